"""Ranks that cannot meet end with one sentence, in a bounded time."""

import pytest
from two_ranks import ended, ranks

ONE_GPU = """
import sys, torch
import torch.distributed as dist
torch.cuda.is_available, torch.cuda.device_count, torch.cuda.set_device = (lambda: True), (lambda: 1), (lambda n: None)
start = dist.init_process_group
dist.init_process_group = lambda backend, **options: start("gloo", **options)
from fedpara.apps import cli
sys.argv = ["fedpara", "run", "--out", "run"]
cli.main()
"""


def test_more_ranks_than_gpus_are_rejected_on_all_ranks(tmp_path):
    """The rank that has a GPU also fails: it must not wait for the other one."""
    with ranks("-c", ONE_GPU, cwd=tmp_path) as processes:
        first, second = ended(processes)
    assert first[0] == second[0] == 2, (first, second)
    assert first[2].startswith("fedpara: rank 1 has no GPU: its machine has 1.")
    assert not (tmp_path / "run").exists()


ALONE = """
import os, sys
from datetime import timedelta
from torch.distributed.rendezvous import rendezvous
from fedpara.apps import cli
from fedpara.engines.distributed import process_group
wait, dies, when = timedelta(seconds=2), int(sys.argv[1]), sys.argv[2]
if int(os.environ["RANK"]) == dies:
    store = next(iter(rendezvous("env://", timeout=wait))) if when == "late" else None
    os._exit(7)
process_group.JOIN_TIMEOUT = wait
sys.argv = ["fedpara", "run", "--out", "run"]
cli.main()
"""


@pytest.mark.parametrize(("dies", "when"), [(1, "late"), (0, "early")])
def test_a_rank_whose_peer_died_before_they_met_ends_in_a_bounded_time(dies, when, tmp_path):
    """Early: before it has reached the other rank; late: before the two have a connection to exchange messages."""
    with ranks("-c", ALONE, str(dies), when, cwd=tmp_path) as processes:
        found = ended(processes)
    assert found[dies][0] == 7
    code, _, output = found[1 - dies]
    assert code == 1, output
    assert f"fedpara: rank {1 - dies} could not reach all 2 ranks within 2 s" in output.splitlines()[-1]
    assert "Traceback" not in output
    assert not (tmp_path / "run").exists()


def test_connected_ranks_wait_longer_than_ranks_that_join(tmp_path):
    """A rank that trains for longer than the joining may take is not given up."""
    script = """
import os, time
from datetime import timedelta
from fedpara.engines.distributed import process_group
process_group.JOIN_TIMEOUT = timedelta(seconds=8)
group = process_group.join()
time.sleep(10 * group.rank)
group.gather("the test")
"""
    with ranks("-c", script, cwd=tmp_path) as processes:
        assert [code for code, *_ in ended(processes)] == [0, 0]
