"""Contracts of the tutorials: every engine gives the same run, and a page agrees with its script."""

import ast
import io
import re
import tokenize
from dataclasses import asdict

import pytest
import torch
from flower_nodes import same_results

import fedpara as fp
from fedpara.experiments import resume
from fedpara.experiments.build import build
from fedpara.experiments.run import lay_out

EVEN = {
    "adapters": {"split": "iid"},
    "own_algorithm": {"dataset": "own_algorithm:disputed(clients=4, count=320)"},
}
"""Clients whose steps fill more than one lane."""


def test_the_batched_engine_equals_the_sequential_one_within_rounding(tutorial):
    runs = []
    small = EVEN.get(tutorial.name, {})
    if tutorial.asked.optimizer == "adamw":
        small = {**small, "lr": 3e-3}  # AdamW amplifies rounding
    for engine in ("sequential", "batched"):
        parts = build(tutorial.experiment(**small))
        runs.append(
            fp.simulate(parts.task, parts.data, parts.algorithm, rounds=2, cohort=3, engine=engine, seed=0)
        )
        assert runs[-1].engine.startswith(engine)
    assert int(re.findall(r"^batched: (\d+) lanes", runs[1].engine)[0]) > 1
    first, second = (run.rounds[-1].scores for run in runs)
    assert first.keys() == second.keys()
    assert first == pytest.approx(second, rel=2e-3, abs=2e-3)
    assert runs[0].bytes == runs[1].bytes
    for key, tensor in runs[0].state.items():
        torch.testing.assert_close(tensor, runs[1].state[key], rtol=1e-3, atol=1e-4)


class Stopped(Exception):
    pass


def test_the_batched_engine_resumes_to_the_same_bits(tutorial, tmp_path):
    def stop(result, timing):
        if result.number == 2:
            raise Stopped

    for name in ("whole", "stopped"):
        lay_out(tutorial.experiment(engine="batched"), tmp_path / name)
    resume(tmp_path / "whole")
    with pytest.raises(Stopped):
        resume(tmp_path / "stopped", on_round=stop)
    resume(tmp_path / "stopped")
    assert same_results(tmp_path / "whole", tmp_path / "stopped")


def test_the_command_of_a_page_repeats_the_numbers_of_its_script(tutorial):
    asked, numbers = asdict(tutorial.asked), {}
    for node in ast.walk(ast.parse(tutorial.script.read_text())):
        if isinstance(node, ast.Call) and re.search(
            r"\b(fedavgm?|fednova|simulate|FedPara)$", ast.unparse(node.func)
        ):
            numbers |= {k.arg: k.value.value for k in node.keywords if isinstance(k.value, ast.Constant)}
    assert {"rounds", "cohort"} < numbers.keys()
    assert {field: asked[field] for field in numbers} == numbers


def test_a_page_states_the_lines_of_code_of_its_script(tutorial):
    """Without blank lines, comments and docstrings."""
    source = tutorial.script.read_text()
    skipped = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT)
    code = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        alone = token.type == tokenize.STRING and token.line.lstrip().startswith(('"""', "'''"))
        if token.type not in skipped and not alone and token.string:
            code |= {*range(token.start[0], token.end[0] + 1)}
    (stated,) = re.findall(r"(\d+) lines of code", tutorial.page)
    assert int(stated) == len(code)
