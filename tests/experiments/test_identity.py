"""Golden: kept runs keep their identity when a field is added, and old folders mean what they meant."""

from dataclasses import replace
from pathlib import Path

import pytest

from fedpara.experiments import Experiment
from fedpara.experiments.config import LATER, read_toml
from fedpara.experiments.storage.summary import read_config

RESULTS = Path(__file__).parents[2] / "results"


def test_golden_a_field_that_was_added_later_leaves_the_identity_of_runs_without_it():
    """The digests of two experiments, as they were before the first such field."""
    assert LATER.keys() == {"validation", "weights", "max_share", "test_owners"}
    assert Experiment().identity == "d9146da9ccc93a55"
    before = Experiment(split="owner", dataset="femnist", model="mlp", test_owners="all")
    assert before.identity == "735bee1d96cbdd41"
    assert replace(before, test_owners="training").identity != before.identity


@pytest.mark.parametrize("changes", [{"split": "iid"}, {"personal": True}])
def test_whose_test_data_it_is_counts_only_where_it_decides_a_score(changes):
    base = replace(Experiment(split="largest"), **changes)
    assert replace(base, test_owners="all").identity == base.identity


def test_golden_every_kept_run_has_the_identity_its_folder_is_named_by():
    folders = sorted(path.parent for path in (RESULTS / "paper").glob("*/config.toml"))
    assert len(folders) > 80
    assert [f.name[-6:] for f in folders] == [read_config(f).identity[:6] for f in folders]


@pytest.mark.parametrize(("said", "found"), [("", "all"), ('test_owners = "training"\n', "training")])
def test_a_run_folder_of_before_was_scored_on_all_owners(tmp_path, said, found):
    """And a config that someone gives to a new run means the default."""
    (tmp_path / "config.toml").write_text(f'split = "owner"\n{said}')
    assert read_config(tmp_path).test_owners == found
    assert read_toml(tmp_path / "config.toml").test_owners == "training"
    (tmp_path / "config.toml").write_text(f'split = "iid"\n{said}')
    assert read_config(tmp_path) == read_toml(tmp_path / "config.toml"), "there it makes no difference"
