"""Which client holds which examples, and which examples score the models."""

import numpy as np

from fedpara import data
from fedpara.data import Examples, FederatedData
from fedpara.data.partition import Partition
from fedpara.errors import ConfigError
from fedpara.experiments.config import OWNED, Experiment


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
    theirs = data.personal_test(test.targets, clients, train.targets, seed=experiment.seed)
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
    if experiment.split == "largest":
        theirs = _largest_first(theirs, _by_owner(experiment, train))
    theirs = theirs[: len(clients)]
    scored = test
    if only_training_owners and len(theirs.indices) < len(test):
        scored = test.subset(np.sort(theirs.indices))
    return FederatedData(train, clients, personal=(test, theirs) if experiment.personal else None), scored


def _clients(experiment: Experiment, train: Examples) -> Partition:
    n, seed, labels = experiment.clients, experiment.seed, train.targets
    if experiment.split == "iid":
        return data.iid(labels, n, seed)
    if experiment.split == "dirichlet":
        return data.dirichlet(labels, n, experiment.alpha, seed)
    if experiment.split == "dirichlet-capped":
        return data.dirichlet_capped(labels, n, experiment.alpha, seed)
    if experiment.split == "shards":
        return data.shards(labels, n, seed, experiment.classes_per_client)
    owned = _by_owner(experiment, train)
    if experiment.split == "largest":
        owned = _largest_first(owned, owned)
    return owned[:n]


def _by_owner(experiment: Experiment, train: Examples) -> Partition:
    if train.owners is None:
        raise ConfigError(
            f"the examples of {experiment.dataset} have no owners: choose iid, dirichlet or shards."
        )
    return data.by_owner(train.owners)


def _largest_first(owners: Partition, training: Partition) -> Partition:
    """The owners with the most training examples first; ties keep their order."""
    return Partition.of([owners[int(i)] for i in np.argsort(-training.sizes, kind="stable")])


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
    if train.inputs.dim() == 2 and not train.inputs.is_floating_point():  # character ids
        training, held_out = _ends_of_texts(train, clients, fraction)
    else:
        training, held_out = data.split(clients, train.targets, fraction, experiment.seed, exact=True)
    if not len(held_out.indices):
        raise ConfigError(
            f"validation is {fraction}, but no client has an example to spare: use fewer clients or a larger fraction."
        )
    return training, held_out


def _ends_of_texts(train: Examples, clients: Partition, fraction: float) -> tuple[Partition, Partition]:
    """Hold out the last `fraction` of each owner's text, whichever client has it.

    Windows of a text overlap. The label of a randomly chosen window is also inside its neighbours, which clients
    train on. The labels at the end of a text are in no earlier window.
    """
    texts = [np.arange(len(train))] if train.owners is None else data.by_owner(train.owners)
    late = np.zeros(len(train), dtype=bool)
    for text in texts:
        late[text[len(text) - min(round(fraction * len(text)), len(text) - 1) :]] = True
    training, held_out = [], []
    for row in clients:
        chosen = late[row]
        if chosen.all():  # at least one example stays in training
            chosen[0] = False
        training.append(row[~chosen])
        held_out.append(row[chosen])
    return Partition.of(training), Partition.of(held_out)
