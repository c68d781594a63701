"""Any experiment as a miniature: the same words, a narrow network, drawn data, two rounds."""

from dataclasses import replace

from fedpara.experiments.config import Experiment

NARROW = {"vgg16": "vgg16-tiny", "resnet18": "resnet18-tiny", "lstm": "lstm-tiny"}
CLIENTS, COHORT, ROUNDS = 6, 2, 2
MINIATURE = "ours is a miniature: generated data, small networks"
"""What must stand beside its numbers where they are held against the paper's."""


def tiny(experiment: Experiment) -> Experiment:
    """No real data, a few clients, seconds on a CPU. Its accuracies mean nothing."""
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
