"""Runs to report: the miniature of Table 2a on CIFAR-10 IID with two seeds."""

import pytest

from fedpara.experiments import paper
from fedpara.experiments.storage.catalog import Library
from fedpara.experiments.studies.reproduce import carry_out
from fedpara.report.tables import table_of


@pytest.fixture(scope="session")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("report") / "tiny"
    carry_out(
        ["capacity-cnn"],
        seeds=2,
        scale="tiny",
        only="cifar10-iid",
        out=folder,
        finished_in=(),
        engine="sequential",
    )
    return folder


@pytest.fixture(scope="session")
def library(runs):
    return Library.of(runs)


@pytest.fixture(scope="session")
def tables(library):
    return [table_of(study, library, range(4), scale="tiny") for study in paper.STUDIES.values()]
