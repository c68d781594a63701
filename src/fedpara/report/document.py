"""docs/reproduction.md: every table of the paper beside our runs, and the headline table of the README.

fedpara report results --out docs/reproduction.md
"""

from collections.abc import Sequence

from fedpara.experiments.paper import Ratio
from fedpara.experiments.paper.recipe import CHOSEN
from fedpara.report.formats import markdown
from fedpara.report.others import OTHERS
from fedpara.report.tables import NO_NUMBER, NOT_RUN, TO_RUN_AGAIN, Table
from fedpara.report.tuned_studies import TITLES
from fedpara.report.tuning import TUNED, is_tuned

PROTOCOL = f"""\
**Protocol.** {TUNED}
A trial holds out about a tenth of every client's training data and is scored on it. Every method gets the same number
of trials, and its best one is chosen. Final runs of the chosen setting score the test set. The tables "Tuned methods"
show the results, and the tables "Trials" show every trial. A number of trials in the next table marks a result of this
protocol. One trial of each method on CIFAR-10 is the old recipe, which was found by test accuracy on seed 0. These
trials have 60 rounds and the final runs 200, so the choice favours settings that learn fast at first. The narrow net's
choice for non-IID data clips gradients to norm 1; other trials of it are within one standard error."""
OTHERWISE = "**All other trained results are optimistic.** "

BEGIN, END = "<!-- headline: from docs/reproduction.md -->", "<!-- end of headline -->"

NARROW = TITLES["narrow"]

# (study, row, column, words in the README)
HEADLINE = (
    ("capacity-cnn", "original", "CIFAR-10 IID", "VGG16, original weights, CIFAR-10 IID, 200 rounds [%]"),
    ("capacity-cnn", "FedPara", "CIFAR-10 IID", "FedPara, a tenth of the parameters [%]"),
    ("capacity-cnn", "low-rank", "CIFAR-10 IID", "low-rank, the same size [%]"),
    ("tuned-cifar10-iid", NARROW, "test accuracy [%]", "a narrower dense VGG16, the same size [%]"),
    ("capacity-cnn", "original", "CIFAR-10 non-IID", "original weights, non-IID [%]"),
    ("capacity-cnn", "FedPara", "CIFAR-10 non-IID", "FedPara, non-IID [%]"),
    ("capacity-cnn", "low-rank", "CIFAR-10 non-IID", "low-rank, non-IID [%]"),
    ("tuned-cifar10-noniid", NARROW, "test accuracy [%]", "the narrower dense VGG16, non-IID [%]"),
    (
        "communication",
        "CIFAR-10 IID, 80%",
        "times fewer",
        "FedPara: times fewer bytes to 80% than the original",
    ),
    ("optimizers", "FedDyn", "accuracy", "FedPara with FedDyn [%]"),
    (
        "quantization",
        "FedPara + FedPAQ",
        "MB per client and round",
        "FedPara, γ 0.5, float16 uplink [MB per client and round]",
    ),
    (
        "personalization",
        "pFedPara",
        "times fewer parameters sent",
        "pFedPara: times fewer parameters sent than FedAvg",
    ),
)


def document(tables: Sequence[Table], of: str = "results", to: str = "docs/reproduction.md") -> str:
    """The document. `of` and `to` are the arguments of `fedpara report`, which its first lines show."""
    by_name = {table.study.name: table for table in tables}
    parts = [
        "# Results: reproduction of the paper",
        "Every table and figure of the paper beside our runs. Each cell is paper / **ours**. ± is over seeds.\n"
        f"Our numbers come from the run folders in `{of}`, or are computed if they need no training.\n"
        "`fedpara reproduce NAME` runs a table, and `fedpara reproduce --list` shows the cost of each. A heading\n"
        f"begins with the NAME. `fedpara report {of} --out {to}` wrote this page; do not edit it.",
        f'"{NOT_RUN}" marks a missing run. "{TO_RUN_AGAIN}" marks a run whose experiment was corrected later, or\n'
        f'which was scored on the wrong examples. Such runs are in the last table, "{OTHERS}".',
        *([PROTOCOL, OTHERWISE + CHOSEN] if any(map(is_tuned, tables)) else [f"**{CHOSEN}**"]),
        *dict.fromkeys(f"**{table.caveat}.**" for table in tables if table.caveat),
        BEGIN,
        headline(by_name),
        END,
        *(_section(table) for table in tables),
    ]
    return "\n\n".join(parts) + "\n"


def headline(tables: dict[str, Table]) -> str:
    """The table of the README, as Markdown."""
    lines = ["| | paper | here | seeds | trials |", "|---|---:|---:|---:|---:|"]
    for name, row, column, words in HEADLINE:
        entry = tables[name].at(row, column) if name in tables else None
        if entry is None:  # not in the paper, and not run
            cells = [NO_NUMBER, NOT_RUN, NO_NUMBER, NO_NUMBER]
        else:
            trials = str(entry.trials or NO_NUMBER) if entry.value is not None else NO_NUMBER
            cells = [entry.paper_text, entry.number_text, entry.seeds_text, trials]
        lines.append(f"| {' | '.join([words, *cells])} |")
    return "\n".join(lines)


def _section(table: Table) -> str:
    study = table.study
    notes = "\n".join(f"- {note}" for note in study.notes).replace("docs/log.md", "[docs/log.md](log.md)")
    seeds = sorted({sample.seeds for entry in table.entries for sample in entry.samples if sample.seeds})
    if seeds:
        kind = "95% confidence interval" if study.spread == "ci95" else "standard deviation"
        count = str(seeds[0]) if len(seeds) == 1 else f"{seeds[0]} to {seeds[-1]}"
        repeats = f"- Seeds: {count}" + (f"; ± is the {kind}." if seeds[-1] > 1 else ".")
        if seeds[-1] > 1:
            repeats += _of_two_runs(table)
        notes = f"{notes}\n{repeats}".strip()
    caveat = f"**{table.caveat}.**" if table.caveat else ""
    head = f"## {study.name}: {study.title}\n\n{study.source[0].upper()}{study.source[1:]}."
    return "\n\n".join(filter(None, [head, caveat, markdown(table), notes]))


def _of_two_runs(table: Table) -> str:
    """Sentences about the cells that combine two runs."""
    sentences = ""
    if any(isinstance(cell.measure, Ratio) for cell in table.study.cells):
        sentences += (
            " A ratio divides two means, each over all seeds of its runs; brackets show how many. Its ± is by "
            "first-order error propagation. A mean of one seed adds nothing to it."
        )
    if any(len(cell.experiments) > 1 and not isinstance(cell.measure, Ratio) for cell in table.study.cells):
        sentences += " A difference of two runs uses the seeds that both have."
    return sentences
