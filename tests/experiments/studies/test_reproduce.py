"""Contract: a killed study resumes, runs nothing twice, and gives the same table."""

import json
import logging
import shutil
from dataclasses import replace

import pytest

from fedpara.errors import ConfigError, RunError, UsageError
from fedpara.experiments import Experiment, paper, read_run, resume
from fedpara.experiments.config_file import to_toml
from fedpara.experiments.storage import catalog
from fedpara.experiments.storage.catalog import Library, archive_run, cut, refuse_own
from fedpara.experiments.storage.summary import Summary
from fedpara.experiments.studies.reproduce import archive_finished, carry_out, jobs
from fedpara.report.tables import NOT_RUN, table_of

STUDY = "personalization"
ONLY = "mnist-shards"
PFEDPARA = "mnist-shards-mlp-pfedpara0.5"
TINY = {"seeds": 1, "scale": "tiny", "only": ONLY, "finished_in": (), "engine": "sequential"}


class Stop(Exception):
    pass


class Rounds:
    """Records every round, and stops the study after `stop_at` of them."""

    def __init__(self, stop_at=None):
        self.seen, self.stop_at = [], stop_at

    def __call__(self, name, experiment):
        def watch(result, timing):
            self.seen.append((name, result.number))
            if len(self.seen) == self.stop_at:
                raise Stop

        return watch


def texts(folder):
    table = table_of(paper.study(STUDY), Library.of(folder), range(1), scale="tiny")
    return [entry.text for entry in table.entries]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The uninterrupted study: (folder, rounds)."""
    folder, rounds = tmp_path_factory.mktemp("whole"), Rounds()
    carry_out([STUDY], out=folder, begin=rounds, **TINY)
    return folder, rounds


@pytest.mark.parametrize("stop_at", [1, 4, 5])
def test_a_stopped_study_resumes_and_runs_nothing_twice(whole, tmp_path, stop_at):
    first, second = Rounds(stop_at), Rounds()
    with pytest.raises(Stop):
        carry_out([STUDY], out=tmp_path, begin=first, **TINY)
    carry_out([STUDY], out=tmp_path, begin=second, **TINY)
    assert len(first.seen) == stop_at
    assert first.seen + second.seen == whole[1].seen
    assert texts(tmp_path) == texts(whole[0])


def test_runs_that_are_played_elsewhere_give_the_same_table(whole, tmp_path):
    """A new run gets a folder, a stopped one keeps its rounds, and `play` resumes both. The error of a run is named."""
    with pytest.raises(Stop):
        carry_out([STUDY], out=tmp_path, begin=Rounds(3), **TINY)
    played = {}

    def play(paths):
        played.update({name: read_run(path).rounds for name, path in paths.items()})
        first, *others = paths
        return {name: resume(paths[name]) for name in others}, {first: RunError("it broke")}

    with pytest.raises(RunError, match=r"1 of 4 runs failed, the others are done. \S+: it broke"):
        carry_out([STUDY], out=tmp_path, play=play, **TINY)
    assert sorted(played.values()) == [0, 0, 1], "the finished run is not played"
    carry_out(
        [STUDY], out=tmp_path, play=lambda paths: ({name: resume(paths[name]) for name in paths}, {}), **TINY
    )
    assert texts(tmp_path) == texts(whole[0])


def test_a_finished_study_runs_nothing(whole):
    again = Rounds()
    found = carry_out([STUDY], out=whole[0], begin=again, **TINY)
    assert again.seen == []
    assert len(found) == 4
    assert {summary.rounds for summary in found} == {2}


def test_a_finished_study_names_the_engine_that_ran(whole, caplog):
    caplog.set_level(logging.INFO, "fedpara")
    carry_out([STUDY], out=whole[0], **{**TINY, "engine": "batched"})
    assert len(caplog.messages) == 4
    assert all("not run again; it ran sequential: " in text for text in caplog.messages)


def test_an_archived_run_counts_as_finished(whole, tmp_path):
    """It has no checkpoint and no client memories, and gives the same table."""
    archived = archive_finished(whole[0], tmp_path / "results")
    assert len(archived) == 4
    for path in archived:
        assert {file.name for file in path.iterdir()} == {
            "clients.jsonl",
            "config.toml",
            "environment.json",
            "metrics.jsonl",
            "timing.jsonl",
        }
    again = Rounds()
    carry_out([STUDY], out=tmp_path / "out", begin=again, **{**TINY, "finished_in": (tmp_path / "results",)})
    assert again.seen == []
    assert texts(tmp_path / "results") == texts(whole[0])


def test_an_archived_run_does_not_overwrite_another(whole, tmp_path):
    first, second = sorted(path for path in whole[0].iterdir() if path.is_dir())[:2]
    small = archive_run(first, tmp_path / "small")
    assert archive_run(first, tmp_path / "small") == small
    before = (small / "metrics.jsonl").read_bytes()
    another = shutil.copytree(second, tmp_path / first.name)
    with pytest.raises(ConfigError, match=r"already holds a different run than"):
        archive_run(another, tmp_path / "small")
    assert (small / "metrics.jsonl").read_bytes() == before


def test_an_archive_that_was_interrupted_is_no_run_and_continues(whole, tmp_path, monkeypatch):
    run = next(path for path in whole[0].iterdir() if path.is_dir())
    into, write = tmp_path / "small", catalog.write_bytes
    for last in range(4):
        left = [last]

        def interrupted(path, content, left=left):
            if left[0] == 0:
                raise KeyboardInterrupt
            left[0] -= 1
            write(path, content)

        with monkeypatch.context() as patch:
            patch.setattr(catalog, "write_bytes", interrupted)
            with pytest.raises(KeyboardInterrupt):
                archive_run(run, into)
        found = Library.of(into)
        assert (list(found), found.damaged) == ([], {})
    small = archive_run(run, into)
    assert read_run(small).metrics == read_run(run).metrics
    assert (small / "config.toml").read_bytes() == (run / "config.toml").read_bytes()


def test_an_archived_run_cannot_be_resumed(whole, tmp_path):
    """Opening it would drop every round, since it has no checkpoint."""
    run = next(path for path in whole[0].iterdir() if path.is_dir())
    small = archive_run(run, tmp_path)
    before = (small / "metrics.jsonl").read_bytes()
    with pytest.raises(RunError, match="cannot be resumed"):
        resume(small, rounds=3)
    assert (small / "metrics.jsonl").read_bytes() == before


def test_an_archived_run_of_one_round_cannot_be_resumed(whole, tmp_path):
    """A kill before the first checkpoint leaves one line too, but beside model.json and data.json."""
    (one,) = carry_out([STUDY], out=tmp_path / "out", **{**TINY, "only": PFEDPARA, "rounds": 1})
    small = archive_run(one.path, tmp_path / "small")
    before = {path: path.read_bytes() for path in small.iterdir()}
    with pytest.raises(RunError, match=r"has 1 round and no checkpoint\.safetensors: it is an archived run"):
        resume(small, rounds=3)
    assert {path: path.read_bytes() for path in small.iterdir()} == before


def test_more_rounds_than_an_archived_run_has_start_a_new_run(whole, tmp_path):
    archive_finished(whole[0], tmp_path / "results")
    rounds = Rounds()
    given = {**TINY, "only": PFEDPARA, "rounds": 3, "finished_in": (tmp_path / "results",)}
    found = carry_out([STUDY], out=tmp_path / "out", begin=rounds, **given)
    assert [number for _, number in rounds.seen] == [1, 2, 3]
    assert [summary.rounds for summary in found] == [3]


def test_a_longer_run_contains_the_shorter_one(whole):
    (job,) = jobs([STUDY], Library.of(whole[0]), seeds=1, rounds=1, scale="tiny", only=PFEDPARA)
    assert job.found is not None
    assert [line["round"] for line in job.found.metrics] == [1]
    (job,) = jobs([STUDY], Library.of(whole[0]), seeds=1, rounds=3, scale="tiny", only=PFEDPARA)
    assert job.found is None
    assert job.resumable is not None


def test_a_longer_run_needs_a_score_at_the_shorter_ones_end(whole):
    """Only every fifth round of a paper run is scored: cut to three rounds it has no accuracy."""
    library = Library.of(whole[0])
    (job,) = jobs([STUDY], library, seeds=1, rounds=2, scale="tiny", only=PFEDPARA)
    first, last = job.found.metrics
    run = replace(job.found, metrics=[first | {"accuracy": None}, last])
    rare = Library({job.experiment.identity: (run,)})
    assert rare.find(job.experiment) == run
    (shorter,) = jobs([STUDY], rare, seeds=1, rounds=1, scale="tiny", only=PFEDPARA)
    assert shorter.found is None
    assert shorter.resumable is None, "it is already longer"


def test_a_longer_run_of_another_metric_contains_the_shorter_one(whole):
    library = Library.of(whole[0])
    (job,) = jobs([STUDY], library, seeds=1, rounds=2, scale="tiny", only=PFEDPARA)
    lines = tuple(line | {"accuracy": None, "score": 0.5} for line in job.found.metrics)
    other = Library({job.experiment.identity: (replace(job.found, metrics=lines),)})
    (shorter,) = jobs([STUDY], other, seeds=1, rounds=1, scale="tiny", only=PFEDPARA)
    assert [line["round"] for line in shorter.found.metrics] == [1]


def test_more_rounds_continue_the_run(whole, tmp_path):
    carry_out([STUDY], out=tmp_path, **{**TINY, "only": PFEDPARA})
    rounds = Rounds()
    given = {**TINY, "only": PFEDPARA, "rounds": 3}
    carry_out([STUDY], out=tmp_path, begin=rounds, **given)
    assert [number for _, number in rounds.seen] == [3]
    (folder,) = (path for path in tmp_path.iterdir() if path.is_dir())
    assert read_run(folder).rounds == 3


def test_missing_runs_are_marked(whole):
    found = texts(whole[0])
    scenarios = [cell.column for cell in paper.study(STUDY).cells]
    for column, text in zip(scenarios, found, strict=True):
        assert (text == NOT_RUN) == column.startswith(("Scenario 1", "Scenario 2"))


def test_all_first_seeds_come_before_the_second_ones():
    seeds = [job.experiment.seed for job in jobs(["techniques", "optimizers"], Library({}), seeds=2)]
    assert seeds == sorted(seeds)
    assert seeds.count(0) == seeds.count(1) > 5


def test_a_run_that_fails_does_not_stop_the_others(tmp_path):
    """One diverging method must not cost a night."""
    (broken,) = jobs([STUDY], Library({}), seeds=1, scale="tiny", only="mnist-shards-mlp-original-share-none")
    folder = tmp_path / broken.name
    folder.mkdir()
    (folder / "something.txt").write_text("in the way")
    (folder / "config.toml").write_text(to_toml(broken.experiment))
    (folder / "metrics.jsonl").write_text('{"round": 1')
    (folder / "checkpoint.safetensors").write_bytes(b"damaged")
    with pytest.raises(RunError, match=f"1 of 4 runs failed, the others are done. {broken.name}"):
        carry_out([STUDY], out=tmp_path, **TINY)
    assert sum(run.rounds == 2 for run in Library.of(tmp_path)) == 3
    with pytest.raises(RunError, match=rf"1 of 1 runs failed\. {broken.name}"):
        carry_out([STUDY], out=tmp_path, **{**TINY, "only": broken.name})


def test_an_unreadable_folder_does_not_stop_the_others(whole, tmp_path, caplog):
    shutil.copytree(whole[0], tmp_path / "out")
    own, other = sorted(path for path in (tmp_path / "out").iterdir() if path.is_dir())[:2]
    other = other.rename(other.with_name("another"))
    (other / "metrics.jsonl").write_text("{}\n")
    caplog.set_level(logging.INFO, "fedpara")
    rounds = Rounds()
    given = {**TINY, "begin": rounds}
    assert len(carry_out([STUDY], out=tmp_path / "out", **given)) == 4
    assert len(rounds.seen) == 2, "the one that was moved away"
    assert [
        text for text in caplog.messages if text.startswith(f"left out: {other}/metrics.jsonl is damaged")
    ]
    (own / "config.toml").write_text("[")
    with pytest.raises(
        RunError, match=rf"1 of 4 runs failed, the others are done. {own.name}: .*is not TOML"
    ):
        carry_out([STUDY], out=tmp_path / "out", **given)
    with pytest.raises(RunError, match="2 runs cannot be read; the others are archived"):
        archive_finished(tmp_path / "out", tmp_path / "small")
    assert len([*(tmp_path / "small").iterdir()]) == 3


def test_the_resumable_folder_with_the_most_rounds_is_chosen(tmp_path):
    """A folder without a checkpoint is resumable only before its first round."""
    experiment = Experiment()

    def begun(*found):
        runs = []
        for name, rounds, *files in found:
            (tmp_path / name).mkdir(exist_ok=True)
            for file in files:
                (tmp_path / name / file).touch()
            runs.append(Summary(tmp_path / name, experiment, [{"round": t + 1} for t in range(rounds)], []))
        return Library({experiment.identity: tuple(runs)}).resumable(experiment)

    assert begun(("new", 0), ("small", 5)) == tmp_path / "new"
    newest, previous = "checkpoint.safetensors", "checkpoint.previous.safetensors"
    assert begun(("a", 2, newest), ("b", 4, previous), ("c", 3, newest), ("small", 5)) == tmp_path / "b"


def test_an_archived_run_has_no_absolute_paths(tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.toml").write_text(to_toml(Experiment()))
    (run / "environment.json").write_text(
        '{"command": ["/home/me/bin/fedpara", "run", "--out", "/home/me/a"]}'
    )
    small = archive_run(run, tmp_path / "small")
    assert json.loads((small / "environment.json").read_text())["command"] == ["fedpara", "run", "--out", "a"]


def test_files_of_a_run_are_protected_through_links_too(tmp_path):
    run = tmp_path / "run"
    (run / "clients").mkdir(parents=True)
    for name in ("config.toml", "environment.json"):
        (run / name).touch()
    (tmp_path / "link").symlink_to(run / "clients")
    for place in (run / "nodes-abc" / "a.html", run / "clients" / "a.html", tmp_path / "link" / "a.html"):
        with pytest.raises(UsageError, match="belongs to the run in"):
            refuse_own(place)
    refuse_own(run / "a.html")


def test_a_cut_run_counts_the_time_of_its_rounds(tmp_path):
    lines = [{"round": t, "seconds": float(t)} for t in (1, 2, 3)]
    assert cut(Summary(tmp_path, Experiment(), lines, lines), 2).seconds == 3.0
