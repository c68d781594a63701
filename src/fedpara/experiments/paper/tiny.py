"""Miniature experiments: the same fields with a narrow network, generated data and two rounds."""

from dataclasses import replace

from fedpara.experiments.config import Experiment

NARROW = {"vgg16": "vgg16-tiny", "resnet18": "resnet18-tiny", "lstm": "lstm-tiny"}
CLIENTS, COHORT, ROUNDS = 6, 2, 2
MINIATURE = "ours is a miniature: generated data, small networks"
"""Shown beside the numbers of such runs."""


def tiny(experiment: Experiment) -> Experiment:
    """The experiment with generated data and few clients, in seconds on a CPU. Its accuracies mean nothing."""
    model = next(
        (narrow for wide, narrow in NARROW.items() if experiment.model.startswith(wide)), experiment.model
    )
    return replace(
        experiment,
        dataset=f"generated:{experiment.dataset}",
        model=model,
        clients=CLIENTS,
        keep=None if experiment.keep is None else COHORT,
        cohort=COHORT,
        rounds=ROUNDS,
        epochs=None,
        steps=1,
        batch_size=min(experiment.batch_size, 4),
        evaluate_every=1,
    )
