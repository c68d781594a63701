"""Golden: a new config field changes neither the identity of old runs nor their meaning."""

from dataclasses import replace
from pathlib import Path

import pytest

from fedpara.experiments import Experiment
from fedpara.experiments.config import LATER
from fedpara.experiments.config_file import read_toml
from fedpara.experiments.storage.summary import read_config

RESULTS = Path(__file__).parents[2] / "results"


def test_golden_identities_survive_new_fields():
    """The identities of two experiments from before the first such field."""
    assert LATER.keys() == {
        *("validation", "weights", "max_share", "test_owners"),
        *("sampler", "lost", "bandwidth", "speed", "device_deadline"),
        *("loss", "metrics", "optimizer", "schedule", "keep_optimizer", "onto", "adapter_alpha", "train"),
        *("secure", "objects", "rotate", "privacy", "delta", "privacy_seed", "robust", "attack", "hostile"),
        *("products", "gammas", "fold_every", "recycle"),
    }
    assert Experiment().identity == "d9146da9ccc93a55"
    before = Experiment(split="owner", dataset="femnist", model="mlp", test_owners="all")
    assert before.identity == "735bee1d96cbdd41"
    assert replace(before, test_owners="training").identity != before.identity


@pytest.mark.parametrize("changes", [{"split": "iid"}, {"personal": True}])
def test_test_owners_counts_only_if_it_affects_a_score(changes):
    base = replace(Experiment(split="largest"), **changes)
    assert replace(base, test_owners="all").identity == base.identity


def test_golden_archived_runs_match_their_folder_names():
    folders = sorted(path.parent for path in (RESULTS / "paper").glob("*/config.toml"))
    assert len(folders) > 80
    assert [f.name[-6:] for f in folders] == [read_config(f).identity[:6] for f in folders]


@pytest.mark.parametrize(("said", "found"), [("", "all"), ('test_owners = "training"\n', "training")])
def test_an_old_run_folder_was_scored_on_all_owners(tmp_path, said, found):
    """A config for a new run uses the default instead."""
    (tmp_path / "config.toml").write_text(f'split = "owner"\n{said}')
    assert read_config(tmp_path).test_owners == found
    assert read_toml(tmp_path / "config.toml").test_owners == "training"
    (tmp_path / "config.toml").write_text(f'split = "iid"\n{said}')
    assert read_config(tmp_path) == read_toml(tmp_path / "config.toml"), "the field has no effect"
