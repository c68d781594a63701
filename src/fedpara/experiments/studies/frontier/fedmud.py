"""`fedpara reproduce fedmud`: FedMUD's protocol (Li et al., ICML 2025), with its methods as combinations of two scales.

    fedavg        whole weights
    lowrank       W = X Y^T, as in FedHM; kernels as matrices
    fedpara       FedPara with one rank for all weights
    mud           the update form: W = base + X Y^T; the base takes in the product after every round
    mud+bkd       the same with blocks of Kronecker products
    mud+bkd+aad   the same with sums that average exactly

CIFAR-10, 100 clients, 10 per round, labels by Dirichlet 0.3, 3 epochs, batch 64, 200 rounds, plain SGD with a constant
rate, random crops and flips, 1/32 of the parameters. The first and the last layer stay dense. This follows the paper
and its code (github.com/Leopold1423/fedmud-icml25), with the differences that `report/frontier.py` states.

Sizes follow FedMUD's code: all trained numbers, with the dense ones, are at most the ratio plus SLACK of FedAvg's. The
ratio of the single weights falls in steps of SLACK until that holds. The rank of FedPara is the largest that fits.
"""

from collections.abc import Mapping

from fedpara.experiments.config import Experiment
from fedpara.experiments.studies.frontier.combinations import Scale, Values

SLACK = 0.001
METHODS = ("fedavg", "lowrank", "fedpara", "mud", "mud+bkd", "mud+bkd+aad")


def _methods(lowrank: float, kronecker: float, rank: int) -> Mapping[str, Values]:
    """`lowrank` and `kronecker` are the ratios of single weights, `rank` is FedPara's."""
    matrices = {"scheme": "lowrank", "ratio": lowrank, "conv": "reshape", "where": "inner"}
    blocks = {"ratio": kronecker, "where": "inner", "fold_every": 1}
    values: tuple[Values, ...] = (
        {"scheme": "original"},
        matrices,
        {"scheme": "fedpara", "rank": rank, "where": "inner"},
        {**matrices, "fold_every": 1},
        {"scheme": "kronecker", **blocks},
        {"scheme": "kronecker-aad", **blocks},
    )
    return dict(zip(METHODS, values, strict=True))


_CIFAR10 = Scale(
    base=Experiment(
        dataset="cifar10",
        model="vgg16-half",
        split="dirichlet",
        alpha=0.3,
        clients=100,
        cohort=10,
        rounds=200,
        epochs=3,
        batch_size=64,
        augment="crop-flip",
        evaluate_every=5,
    ),
    networks=_methods(lowrank=1 / 32, kronecker=1 / 32 - SLACK, rank=9),
    combinations=METHODS,
    target=0.60,
    validation=0.1,
    trial_rounds=60,
    trial_target=0.45,
    rates=(0.01, 0.03, 0.1, 0.3, 1.0, 3.0),
    ratio=1 / 32,
)

_DIGITS = Scale(
    base=Experiment(
        dataset="digits",
        model="fedpara.models:mlp(inputs=64, hidden=256, layers=4)",
        split="dirichlet",
        alpha=0.3,
        clients=20,
        cohort=4,
        rounds=30,
        epochs=3,
        batch_size=16,
        clip=2.0,
        engine="sequential",
        device="cpu",
    ),
    networks=_methods(lowrank=0.039, kronecker=0.04, rank=2),
    combinations=METHODS,
    target=0.85,
    validation=0.2,
    trial_rounds=15,
    trial_target=0.85,
    rates=(0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0),
    ratio=1 / 8,
)

FEDMUD = {"cifar10": _CIFAR10, "digits": _DIGITS}
"""digits is a miniature for a CPU. Its dense layers alone are 9% of the network, so its ratio is 1/8."""
