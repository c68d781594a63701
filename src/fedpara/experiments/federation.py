"""Which client holds which examples, and which examples score the models."""

from os import PathLike

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from fedpara import data, references
from fedpara.data import Examples, FederatedData
from fedpara.data.partition import Partition
from fedpara.data.validation import hold_out, labels_of
from fedpara.errors import ConfigError, FedParaError
from fedpara.experiments.config import OWNED, Experiment
from fedpara.experiments.node_data import is_own, server_side

SPLITTING = ("split", "alpha", "keep", "classes_per_client", "data_fraction", "test_owners")
"""Fields that divide examples over clients."""


DRAWN_FROM = 5
BY_CLASS = ("dirichlet", "dirichlet-capped", "shards")
"""Splits that look at the examples' classes."""


def load_federation(
    experiment: Experiment, data_dir: str | PathLike[str] | None = None
) -> tuple[FederatedData, Examples | None]:
    """The clients' examples and the examples that score the global model, from the data set that is named.

    A referenced function returns (train, test), which are divided as the experiment says, or a FederatedData.
    """
    if is_own(experiment.dataset):
        return server_side(experiment)
    if not references.is_reference(experiment.dataset):
        return build_federation(experiment, *data.load(experiment.dataset, data_dir))
    match references.call(
        experiment.dataset,
        offered={"data_dir": data_dir, "seed": experiment.seed, "clients": experiment.clients},
    ):
        case FederatedData() as federation:
            _refuse_splitting(experiment, federation)
            if experiment.validation:
                return hold_out(federation, experiment.validation, experiment.seed, experiment.personal)
            return federation, federation.test
        case (Examples() as train, Examples() as test):
            return build_federation(experiment, train, test)
        case other:
            raise references.wrong_result(
                experiment.dataset, other, "(train, test), both fedpara Examples, or a FederatedData"
            )


def _refuse_splitting(experiment: Experiment, federation: FederatedData) -> None:
    """ConfigError for a field that has no effect, because the custom function has chosen the clients."""
    for name in SPLITTING:
        if getattr(experiment, name) != getattr(Experiment, name):
            raise ConfigError(
                f"{name} is {getattr(experiment, name)!r}, but {experiment.dataset!r} returns a FederatedData, which "
                f"already has its clients: leave {name} out."
            )
    if experiment.clients not in (Experiment.clients, len(federation)):
        raise ConfigError(
            f"clients is {experiment.clients}, but {experiment.dataset!r} returns a FederatedData with "
            f"{len(federation)} clients: leave clients out."
        )


def build_federation(
    experiment: Experiment, train: Examples, test: Examples
) -> tuple[FederatedData, Examples]:
    """The clients' examples, and the examples that score the global model.

    With `validation`, the examples to score are held out from the clients' own and `test` is not used.
    """
    clients = _clients(experiment, train)
    if experiment.keep is not None:
        clients = clients[: experiment.keep]
    if experiment.data_fraction < 1:
        clients = _sampled(clients, experiment.data_fraction, experiment.seed)
    if experiment.validation:
        training, held_out = _split_validation(experiment, train, clients)
        own = held_out if experiment.personal else None
        return FederatedData(train, training, test_clients=own), train.subset(held_out.indices)
    if experiment.split in OWNED:
        return _with_owner_tests(experiment, train, test, clients)
    if not experiment.personal:
        return FederatedData(train, clients), test
    theirs = data.personal_test(labels_of(test), clients, labels_of(train), seed=experiment.seed)
    return FederatedData(train, clients, personal=(test, theirs)), test


def _with_owner_tests(
    experiment: Experiment, train: Examples, test: Examples, clients: Partition
) -> tuple[FederatedData, Examples]:
    only_training_owners = experiment.test_owners == "training"
    if not (experiment.personal or only_training_owners):
        return FederatedData(train, clients), test
    if test.owners is None:
        raise ConfigError(
            f"the test examples of {experiment.dataset} have no owners: set test_owners to 'all', without personal."
        )
    theirs = data.by_owner(test.owners, roster=train.owners)
    order = _order(experiment, _by_owner(experiment, train))
    theirs = Partition.of([theirs[int(owner)] for owner in order[: len(clients)]])
    scored = test
    if only_training_owners and len(theirs.indices) < len(test):
        scored = test.subset(np.sort(theirs.indices))
    return FederatedData(train, clients, personal=(test, theirs) if experiment.personal else None), scored


def _or_classes(train: Examples) -> str:
    """Advice for targets that may well be classes."""
    targets = train.targets
    if isinstance(targets, Tensor) and targets.dim() == 1 and not targets.is_floating_point():
        return f", or state in your data that they are, with Examples(..., classes={int(targets.max()) + 1})"
    return ""


def _clients(experiment: Experiment, train: Examples) -> Partition:
    n, seed, labels = experiment.clients, experiment.seed, labels_of(train)
    if references.is_reference(experiment.split):
        return _own_split(experiment, train)
    if train.classes is None and experiment.split in BY_CLASS:
        raise ConfigError(
            f"split {experiment.split!r} divides by class, and the targets are no classes: use iid{_or_classes(train)}."
        )
    if experiment.split == "iid":
        return data.iid(labels, n, seed)
    if experiment.split == "dirichlet":
        return data.dirichlet(labels, n, experiment.alpha, seed)
    if experiment.split == "dirichlet-capped":
        return data.dirichlet_capped(labels, n, experiment.alpha, seed)
    if experiment.split == "shards":
        return data.shards(labels, n, seed, experiment.classes_per_client)
    owned = _by_owner(experiment, train)
    return Partition.of([owned[int(owner)] for owner in _order(experiment, owned)[:n]])


def _own_split(experiment: Experiment, train: Examples) -> Partition:
    """The clients' indices that the referenced function returns, checked before a run starts."""
    got = references.call(experiment.split, train.targets, experiment.clients, experiment.seed)
    try:
        clients = Partition.of([train.checked(row).numpy() for row in got])
    except (TypeError, ValueError, FedParaError) as error:
        raise ConfigError(
            f"{experiment.split!r} returned no split ({str(error).rstrip('.')}): expected a list with each client's "
            f"indices, from 0 to {len(train) - 1}."
        ) from None
    if len(clients) != experiment.clients:
        raise ConfigError(
            f"{experiment.split!r} returned {len(clients)} clients: expected {experiment.clients}, as in `clients`."
        )
    return clients


def _by_owner(experiment: Experiment, train: Examples) -> Partition:
    if train.owners is None:
        raise ConfigError(
            f"the examples of {experiment.dataset} have no owners: choose iid, dirichlet or shards."
        )
    return data.by_owner(train.owners)


def _order(experiment: Experiment, owned: Partition) -> NDArray[np.int64]:
    """The order in which owners become clients.

    owner     as in the data
    largest   those with the most training examples first; ties keep their order
    drawn     drawn by the seed from the DRAWN_FROM times as many that have the most training examples
    """
    if experiment.split == "owner":
        return np.arange(len(owned))
    largest = np.argsort(-owned.sizes, kind="stable")
    if experiment.split == "largest":
        return largest
    return np.random.default_rng((experiment.seed, 2)).permutation(largest[: DRAWN_FROM * experiment.clients])


def _sampled(clients: Partition, fraction: float, seed: int) -> Partition:
    """A random fraction of each client's examples, at least one."""
    generator = np.random.default_rng((seed, 1))
    rows = [generator.permutation(clients[i]) for i in range(len(clients))]
    return Partition.of([np.sort(row[: max(1, round(fraction * len(row)))]) for row in rows])


def _split_validation(
    experiment: Experiment, train: Examples, clients: Partition
) -> tuple[Partition, Partition]:
    """(training examples, held-out examples) of each client."""
    fraction = experiment.validation
    if len(train.shape) == 1 and not train.inputs.is_floating_point():  # character ids
        training, held_out = _ends_of_texts(train, clients, fraction)
    else:
        training, held_out = data.split(clients, labels_of(train), fraction, experiment.seed, exact=True)
    if not len(held_out.indices):
        raise ConfigError(
            f"validation is {fraction}, but no client has an example to spare: use fewer clients or a larger fraction."
        )
    return training, held_out


def _ends_of_texts(train: Examples, clients: Partition, fraction: float) -> tuple[Partition, Partition]:
    """Hold out the last `fraction` of each owner's text, even if several clients share it.

    Windows of a text overlap. The label of a randomly chosen window is also inside its neighbours, which clients
    train on. The labels at the end of a text are outside all earlier windows.
    """
    texts = [np.arange(len(train))] if train.owners is None else data.by_owner(train.owners)
    late = np.zeros(len(train), dtype=bool)
    for text in texts:
        late[text[len(text) - min(round(fraction * len(text)), len(text) - 1) :]] = True
    training, held_out = [], []
    for row in clients:
        chosen = late[row]
        if chosen.all():  # keep at least one example for training
            chosen[0] = False
        training.append(row[~chosen])
        held_out.append(row[chosen])
    return Partition.of(training), Partition.of(held_out)
