"""Who holds which examples of an experiment, and which examples score its models."""

import numpy as np

from fedpara import data
from fedpara.data import Examples, FederatedData
from fedpara.data.partition import Partition
from fedpara.errors import ConfigError
from fedpara.experiments.config import OWNED, Experiment


def build_federation(
    experiment: Experiment, train: Examples, test: Examples
) -> tuple[FederatedData, Examples]:
    """The clients' examples, and those that score the global model.

    With `validation` the latter are held out of the clients' own, and `test` is not used at all.
    """
    clients = _clients(experiment, train)
    if experiment.keep is not None:
        clients = clients[: experiment.keep]
    if experiment.data_fraction < 1:
        clients = _thinned(clients, experiment.data_fraction, experiment.seed)
    if experiment.validation:
        kept, held = _held_out(experiment, train, clients)
        own = held if experiment.personal else None
        return FederatedData(train, kept, test_clients=own), train.subset(held.indices)
    if experiment.split in OWNED:
        return _scored_by_owner(experiment, train, test, clients)
    if not experiment.personal:
        return FederatedData(train, clients), test
    theirs = data.personal_test(test.labels, clients, train.labels, seed=experiment.seed)
    return FederatedData(train, clients, personal=(test, theirs)), test


def _scored_by_owner(
    experiment: Experiment, train: Examples, test: Examples, clients: Partition
) -> tuple[FederatedData, Examples]:
    narrow = experiment.test_owners == "training"
    if not (experiment.personal or narrow):
        return FederatedData(train, clients), test
    if test.owners is None:
        raise ConfigError(
            f"{experiment.dataset} does not say who owns its test examples, so none can be said to be the clients': "
            "set test_owners to 'all', and leave personal out."
        )
    assert train.owners is not None
    theirs = data.by_owner(test.owners, roster=train.owners)
    if experiment.split == "largest":
        theirs = _largest_first(theirs, data.by_owner(train.owners))
    theirs = theirs[: len(clients)]
    scored = test
    if narrow and len(theirs.indices) < len(test):
        scored = test.subset(np.sort(theirs.indices))
    return FederatedData(train, clients, personal=(test, theirs) if experiment.personal else None), scored


def _clients(experiment: Experiment, train: Examples) -> Partition:
    n, seed, labels = experiment.clients, experiment.seed, train.labels
    if experiment.split == "iid":
        return data.iid(labels, n, seed)
    if experiment.split == "dirichlet":
        return data.dirichlet(labels, n, experiment.alpha, seed)
    if experiment.split == "dirichlet-capped":
        return data.dirichlet_capped(labels, n, experiment.alpha, seed)
    if experiment.split == "shards":
        return data.shards(labels, n, seed, experiment.classes_per_client)
    if train.owners is None:
        raise ConfigError(
            f"{experiment.dataset} does not say who owns an example: choose iid, dirichlet or shards."
        )
    owned = data.by_owner(train.owners)
    if experiment.split == "largest":
        owned = _largest_first(owned, owned)
    if experiment.cohort > min(n, len(owned)):
        raise ConfigError(
            f"a cohort of {experiment.cohort} from {min(n, len(owned))} owners: expected no more."
        )
    return owned[:n]


def _largest_first(owners: Partition, training: Partition) -> Partition:
    """The owners in the order of their training examples, the most first; ties in the owners' own order."""
    return Partition.of([owners[int(i)] for i in np.argsort(-training.sizes, kind="stable")])


def _thinned(clients: Partition, fraction: float, seed: int) -> Partition:
    """The first share of each client's examples in a seeded order, at least one."""
    generator = np.random.default_rng((seed, 1))
    rows = [generator.permutation(clients[i]) for i in range(len(clients))]
    return Partition.of([np.sort(row[: max(1, round(fraction * len(row)))]) for row in rows])


def _held_out(experiment: Experiment, train: Examples, clients: Partition) -> tuple[Partition, Partition]:
    """(what each client trains on, what it is scored on)"""
    fraction = experiment.validation
    if train.inputs.dim() == 2 and not train.inputs.is_floating_point():  # character ids
        kept, held = _ends_of_texts(train, clients, fraction)
    else:
        kept, held = data.split(clients, train.labels, fraction, experiment.seed, exact=True)
    if not len(held.indices):
        raise ConfigError(
            f"validation is {fraction} and no client of {experiment.dataset} has an example to spare: use fewer "
            "clients, a larger share or validation = 0."
        )
    return kept, held


def _ends_of_texts(train: Examples, clients: Partition, fraction: float) -> tuple[Partition, Partition]:
    """Held out is what lies in the last share of its owner's text, whoever holds it.

    Windows of a text overlap: the label of one that is drawn at random stands inside its neighbours, which are trained
    on. The labels at the end of a text stand in no window before it.
    """
    texts = [np.arange(len(train))] if train.owners is None else data.by_owner(train.owners)
    late = np.zeros(len(train), dtype=bool)
    for text in texts:
        late[text[len(text) - min(round(fraction * len(text)), len(text) - 1) :]] = True
    kept, held = [], []
    for row in clients:
        chosen = late[row]
        if chosen.all():  # at least one example stays in training
            chosen[0] = False
        kept.append(row[~chosen])
        held.append(row[chosen])
    return Partition.of(kept), Partition.of(held)
