"""sources.json of a run folder: the references of the config and a digest of each of their source files."""

import json
from pathlib import Path
from typing import Any

from fedpara import references
from fedpara.experiments.config import Experiment
from fedpara.source_files import OURS, source_digests

SOURCES = "sources.json"


def describe_sources(experiment: Experiment) -> dict[str, Any]:
    """{"references": {field: reference}, "sha256": {file: digest}}; empty without references to code of the user.

    environment.json has the version of this package.
    """
    own = {
        field: references.parse(text).module.partition(".")[0]
        for field, text in experiment.references.items()
    }
    found = {field: text for field, text in experiment.references.items() if own[field] != OURS}
    return {"references": found, "sha256": source_digests(found.values())} if found else {}


def source_warning(path: Path, experiment: Experiment) -> str:
    """Warning text if a source file of the run's references changed since the run began, else ""."""
    try:
        then = json.loads((path / SOURCES).read_text(encoding="utf-8"))["sha256"]
        now = source_digests(experiment.references.values())
        changed = sorted(name for name in then.keys() | now.keys() if then.get(name) != now.get(name))
    except (OSError, ValueError, RecursionError, TypeError, KeyError, AttributeError):
        return ""  # the file is only informative
    if not changed:
        return ""
    return f"{', '.join(changed)} changed since the run began: the next rounds use the new code."
