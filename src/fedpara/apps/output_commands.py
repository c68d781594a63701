"""`fedpara report` and `fedpara export`: the commands that read run folders, declared as in `commands.py`."""

from pathlib import Path
from typing import Annotated

import typer

from fedpara.apps.terminal.interrupt import starting
from fedpara.choices import CLASSES, FORMATS, REFERENCE


def report(
    runs: Annotated[
        list[Path],
        typer.Argument(exists=True, file_okay=False, help="Run folders, or folders that contain them."),
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            help="Output file, page.html by default; for png and svg a folder, figures by default. An existing file is "
            "replaced only if its ending matches the format. Nothing is written into a run folder."
        ),
    ] = None,
    format_: Annotated[
        str | None, typer.Option("--format", help=", ".join(FORMATS) + "; default: from the file's ending.")
    ] = None,
    scale: Annotated[
        str, typer.Option(help="paper, or tiny (compare miniatures with the paper's tables).")
    ] = "paper",
) -> None:
    """Write tables (paper | ours) and curves of these runs.

    Example: fedpara report results --out page.html
    """
    with starting():
        from fedpara.apps.report import report as work
    work(runs, out, format_, scale)


def export(
    source: Annotated[Path, typer.Argument(exists=True, help="A run folder, or a .safetensors state.")],
    client: Annotated[
        int | None,
        typer.Option(
            help="Export this client's own model, from a run with private parts (pFedPara, FedPer, Local): its private "
            "tensors and the newest shared ones. `before` in metrics.jsonl scores such models."
        ),
    ] = None,
    format: Annotated[str, typer.Option("--format", help="safetensors, onnx or pt2.")] = "safetensors",
    out: Annotated[Path | None, typer.Option(help="Output file; default: next to the source.")] = None,
    model: Annotated[
        str | None,
        typer.Option(
            help=f"The model of a .safetensors state: a library model, or {REFERENCE}. ONNX and pt2 also need it for a "
            "run of a custom model. Your function is imported and called; a function that only a file names is not."
        ),
    ] = None,
    classes: Annotated[
        int | None,
        typer.Option(help=f"Number of classes of a library model; default: {CLASSES}."),
    ] = None,
    shape: Annotated[
        str | None,
        typer.Option(help="Shape of one example, such as 3,32,32; ONNX and pt2 need it."),
    ] = None,
    no_normalise: Annotated[
        bool,
        typer.Option(
            "--no-normalise",
            help="Export the bare network, which takes normalised inputs. By default ONNX and pt2 models of a run take "
            "raw inputs and normalise them.",
        ),
    ] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an existing file.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Write the merged model: plain layers without factors.

    Example: fedpara export runs/first --format onnx
    """
    with starting():
        from fedpara.apps.export import export as work
    work(source, client, format, out, model, classes, shape, not no_normalise, overwrite, as_json)
