"""Links below 8 bits on Flower: the numbers of the sequential engine, and the counted bytes are those that travel."""

from dataclasses import replace

import pytest
from flower_nodes import BASE, Nodes, host, log, run_on_nodes, run_sequentially, same_results

from fedpara.apps.flower import node
from fedpara.engines.flower.rpc import Request, from_packet
from fedpara.experiments import read_run
from fedpara.experiments.run import lay_out, resume
from fedpara.wire import split_messages

CASES = {
    "topk": {"link_up": "topk(0.1, feedback=True)", "link_down": "topk(0.05)"},
    "scaffold": {"link_up": "eden", "link_down": "int4", "algorithm": "scaffold"},
    "grid": {"link_up": "grid(1.0, feedback=True)", "link_down": "grid(0.5)"},
    "pfedpara": {
        "link_up": "sign(feedback=True)",
        "link_down": "int8(feedback=True)",
        "scheme": "pfedpara",
        "personal": True,
    },
    "nothing-shared": {
        "link_up": "int4(feedback=True)",
        "link_down": "int4",
        "scheme": "original",
        "share": "none",
        "personal": True,
    },
}


class Weighed(Nodes):
    """Nodes that record the length of every message, and of how many it consists."""

    def send(self, packets, seconds):
        for _, packet in packets:
            request = from_packet(packet, Request, 1 << 30)
            if request.kind == "train":
                self.sizes = [*getattr(self, "sizes", []), (request.round, len(request.message))]
                self.counts = [*getattr(self, "counts", []), len(split_messages(request.message))]
        return super().send(packets, seconds)


@pytest.mark.parametrize("case", CASES)
def test_flower_equals_the_sequential_engine_and_resumes(tmp_path, case):
    experiment = replace(BASE, rounds=5, cohort=2, **CASES[case])
    run_sequentially(experiment, tmp_path / "a")
    transport = Weighed(tmp_path / "nodes")
    lay_out(experiment, tmp_path / "b")
    for stop in (2, 5):
        resume(
            tmp_path / "b",
            engine="flower",
            host=host(transport),
            on_round=lambda result, _, stop=stop: result.number < stop,
        )
    assert same_results(tmp_path / "a", tmp_path / "b")
    for line in read_run(tmp_path / "b").metrics:
        assert line["down"] == sum(size for round, size in transport.sizes if round == line["round"])
    assert max(transport.counts) > 1 or case in ("grid", "nothing-shared"), "no client had to catch up"


def test_a_node_with_another_initial_model_takes_no_part(tmp_path, monkeypatch):
    """The first difference is added to the initial model, so both ends must have the same one."""
    experiment = replace(BASE, link_down="int4", rounds=1, cohort=1)
    built = node.build

    def other(experiment, data_dir=None):
        parts = built(experiment, data_dir)
        next(parts.task.model.parameters()).data.add_(1e-3)
        return parts

    monkeypatch.setattr(node, "build", other)
    node._site.cache_clear()
    try:
        with pytest.raises(Exception, match="clients have a node"):
            run_on_nodes(experiment, tmp_path / "a", Nodes(tmp_path / "nodes"))
    finally:
        node._site.cache_clear()
    assert "model" in log(tmp_path / "a")
