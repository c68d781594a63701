"""LoadedData: a federation whose examples are read when a client is in a cohort, and then dropped."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from fedpara.data.convert import as_examples, count, in_memory, same_kind
from fedpara.data.examples import Examples
from fedpara.data.federated import FederatedData, Rows, of_classes
from fedpara.errors import ConfigError, DataError, FedParaError, in_a_line
from fedpara.trees import describe, join


def federation_of(
    sources: Sequence[Any] | Callable[[int], Any],
    clients: int | None,
    test: Any,
    tests: Sequence[Any] | Callable[[int], Any] | None,
    sizes: Sequence[int] | None,
    options: Mapping[str, Any],
) -> FederatedData:
    """`FederatedData.of`; `options` are those of `as_examples`."""

    def read(source: Any) -> Examples:
        return as_examples(source, **options)

    scored = None if test is None else _read_named(partial(read, test), "the test data")
    if callable(sources):
        if clients is None:
            raise ConfigError("sources is a function: give the number of `clients` too.")
        named, total = sources, clients
    elif isinstance(sources, Mapping):
        raise ConfigError(
            "sources is a dict: clients have numbers, so give a list, such as list(sources.values())."
        )
    else:
        if not sources:
            raise ConfigError("there are no sources: expected one per client.")
        named, total = sources.__getitem__, len(sources)
        if sizes is None and all(count(source) is not None for source in sources):
            sizes = [count(source) or 0 for source in sources]
        if tests is None and all(map(in_memory, sources)):
            held = [partial(read, source) for source in sources]
            return _joined([_read_named(one, f"client {i}'s data") for i, one in enumerate(held)], scored)
    if tests is not None and not callable(tests) and len(tests) != total:
        raise ConfigError(f"tests of {len(tests)} clients: expected {total}.")
    own = None if tests is None else tests if callable(tests) else tests.__getitem__
    found = LoadedData(
        read=lambda client: read(named(client)),
        count=total,
        read_test=None if own is None else lambda client: read(own(client)),
        given=sizes,
        test=scored,
    )
    if options.get("collate") is not None:
        found.check_collate()
    return found


class LoadedData(FederatedData):
    """A federation whose examples are read when a client needs them. `train` is a part of the first client's."""

    _read: Callable[[int], Examples]
    _read_test: Callable[[int], Examples] | None
    _sizes: dict[int, int]
    _last: dict[int, Examples]
    _classes: tuple[int, int] | None

    def __init__(
        self,
        read: Callable[[int], Examples],
        count: int,
        read_test: Callable[[int], Examples] | None = None,
        given: Sequence[int] | None = None,
        test: Examples | None = None,
    ) -> None:
        if given is not None and len(given) != count:
            raise ConfigError(f"sizes of {len(given)} clients: expected {count}.")
        values: Mapping[str, Any] = {
            "clients": range(count),
            "test_clients": None,
            "personal": None,
            "test": test,
            "_read": read,
            "_read_test": read_test,
            "_sizes": dict(enumerate(map(int, given))) if given is not None else {},
            "_last": {},
            "_classes": None,
        }
        for name, value in values.items():
            object.__setattr__(self, name, value)
        object.__setattr__(self, "train", self._first())

    def _first(self) -> Examples:
        """A few examples of the first client that has any. One that cannot be read is refused later."""
        problem = "no client holds an example."
        for client in range(len(self)):
            if self._sizes.get(client) == 0:
                continue
            try:
                found = self._checked_read(client)
            except DataError as error:
                problem = f"no client's data could be read: {error}"
                continue
            if len(found):
                self._sizes.setdefault(client, len(found))
                return found.subset(range(min(64, len(found))))
        raise ConfigError(problem)

    def check_collate(self) -> None:
        """ConfigError if client 0 or 1 differs from the first client: `collate` pads to a length that changes."""
        for client in range(min(2, len(self))):
            try:
                problem = self._difference(self._checked_read(client))
            except DataError:
                continue  # a round refuses it and says why
            if problem:
                raise ConfigError(f"client {client} cannot be used: {problem}")

    def size(self, i: int) -> int:
        """The number of client i's examples; 0 if they cannot be read."""
        if i not in self._sizes:
            try:
                self.client(i)
            except DataError:
                return 0
        return self._sizes[i]

    @property
    def sizes_known(self) -> bool:
        return len(self._sizes) == len(self)

    def client(self, i: int) -> Examples:
        if i in self._last:
            return self._last[i]
        self._last.clear()
        found = self._checked_read(i)
        if problem := self._difference(found):
            raise DataError(problem)
        if self._classes is not None and (wrong := found.no_class(*self._classes)) is not None:
            raise DataError(f"it has the target {wrong[1]}: {of_classes(*self._classes)}")
        self._sizes[i] = len(found)
        self._last[i] = found
        return found

    def _checked_read(self, i: int) -> Examples:
        try:
            found = self._read(i)
        except DataError:
            raise
        except Exception as error:  # the user's function may raise anything
            raise DataError(in_a_line(error)) from error
        if self._sizes.get(i, len(found)) != len(found):
            raise DataError(f"it holds {len(found)} examples: {self._sizes[i]} were stated.")
        return found

    def _difference(self, found: Examples) -> str:
        """How a client's examples differ from the first client's, or ""."""
        if same_kind(found, self.train):
            return ""
        return (
            f"its examples are {_described(found)} and the first client's are {_described(self.train)}: expected "
            "the same shapes and types, so let `collate` always pad to the same length."
        )

    def expect_classes(self, classes: int, ignored: int) -> None:
        """A client with another target cannot be read from now on."""
        object.__setattr__(self, "_classes", (classes, ignored))

    def some(self, most: int) -> Examples:
        return self.train.part(slice(most))

    def pool(self, clients: Sequence[int]) -> tuple[Examples, dict[int, Rows], dict[int, str]]:
        # Each client is copied to its place and dropped: joining them at the end would hold everything twice.
        pool = self.train.room(sum(self.size(client) for client in clients))
        rows: dict[int, Rows] = {}
        problems: dict[int, str] = {}
        start = 0
        for client in clients:
            try:
                found = self.client(client)
            except DataError as error:
                problems[client] = str(error)
                continue
            end = start + len(found)
            pool.part(slice(start, end)).fill(found)
            rows[client] = np.arange(start, end)
            start = end
            del found
            self._last.clear()
        return pool.part(slice(start)), rows, problems

    @property
    def pooled(self) -> bool:
        return False

    @property
    def has_personal(self) -> bool:
        return self._read_test is not None

    def client_test(self, i: int) -> Examples:
        if self._read_test is None:
            raise ConfigError(
                "personal evaluation needs each client's test data: give FederatedData.of `tests`."
            )
        return _read_named(partial(self._read_test, i), f"client {i}'s test data")


def _read_named(read: Callable[[], Examples], what: str) -> Examples:
    """What `read` returns. The DataError of a failure says what could not be read."""
    try:
        return read()
    except Exception as error:  # the user's function may raise anything
        why = str(error) if isinstance(error, FedParaError) else in_a_line(error)
        raise DataError(f"{what} could not be read: {why}") from error


def _joined(parts: list[Examples], test: Examples | None) -> FederatedData:
    """One set of examples in memory, with each client's rows."""
    for i, part in enumerate(parts):
        if not same_kind(part, parts[0]):
            raise DataError(
                f"client {i}'s examples are {_described(part)} and client 0's are {_described(parts[0])}: expected the "
                "same shapes and types."
            )
    ends = np.cumsum([len(part) for part in parts])
    clients = [np.arange(end - len(part), end) for part, end in zip(parts, ends, strict=True)]
    return FederatedData(concatenated(parts), clients, test=test)


def concatenated(parts: list[Examples]) -> Examples:
    """The examples of all parts, which are of the same kind."""
    first = parts[0]
    inputs, targets = (join([getattr(part, name) for part in parts]) for name in ("inputs", "targets"))
    return Examples(inputs, targets, first.classes, mean=first.mean, std=first.std)


def _described(examples: Examples) -> str:
    one = examples.part(slice(1))
    return f"{describe(one.inputs)} with targets {describe(one.targets)}"
