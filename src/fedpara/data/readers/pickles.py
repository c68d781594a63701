"""Read a publisher's pickle without unpickling it: dicts, lists, tuples, strings, numbers and arrays of bytes.

A pickle is a program, and NumPy's `__setstate__` trusts its input: a crafted dtype crashes the process. So
`pickletools.genops` parses the opcodes, which runs nothing, and this module interprets them on a stack. It imports no
name and builds only objects of the types above. An array is recognised by the calls that restore one,

    _reconstruct(ndarray, (0,), b"b"), then its state (1, shape, dtype("u1"), fortran, content)

and becomes a `Block`, which holds the shape and the content as they are in the file.
"""

import pickletools
from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any

from fedpara.errors import DataError


@dataclass
class Block:
    """An array of uint8 as plain bytes, in Fortran or C order. `shape` is None until its state is read."""

    shape: tuple[int, ...] | None = None
    fortran: bool = False
    content: bytes = b""


@dataclass(frozen=True)
class _Name:
    """The name of a global, which is never imported."""

    module: str
    name: str


class _Mark:
    pass


class _Byte:
    """dtype("u1")."""


_RECONSTRUCT = {_Name(f"numpy.{core}.multiarray", "_reconstruct") for core in ("core", "_core")}
_NDARRAY, _DTYPE, _ENCODE = _Name("numpy", "ndarray"), _Name("numpy", "dtype"), _Name("_codecs", "encode")
_NAMES = {*_RECONSTRUCT, _NDARRAY, _DTYPE, _ENCODE}
_OF_BYTES = (3, "|", None, None, None, -1, -1, 0)
"""The state of dtype("u1"): version, byte order, no subarray, no names, no fields, the usual size and alignment."""


def loads(content: bytes, where: str) -> Any:
    """The object in `content`. The DataError for a damaged or unexpected pickle names `where`."""
    try:
        return _read(content)
    except DataError as error:
        raise DataError(f"{where}: {error}. Download the file again from its publisher.") from None
    except Exception as error:  # a damaged pickle can raise anything, but runs nothing
        raise DataError(
            f"{where} is damaged: its {len(content):,} bytes are not a complete pickle ({error}). "
            "Download the file again from its publisher."
        ) from None


def _read(content: bytes) -> Any:
    machine = _Machine()
    for opcode, argument, _ in pickletools.genops(content):
        if opcode.name == "STOP":
            (value,) = machine.stack
            return value
        machine.step(opcode.name, argument)
    raise ValueError("it has no end")


class _Machine:
    """The stack and the memo of a pickle, with the opcodes of plain containers and arrays."""

    def __init__(self) -> None:
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}

    def step(self, name: str, argument: Any) -> None:
        if name in _SKIPPED:
            return
        if name in _CONSTANTS:
            self.stack.append(_CONSTANTS[name]())
        elif name in _VALUES:
            self.stack.append(argument)
        elif name in ("PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE"):
            self.memo[len(self.memo) if name == "MEMOIZE" else argument] = self.stack[-1]
        elif name in ("GET", "BINGET", "LONG_BINGET"):
            self.stack.append(self.memo[argument])
        elif name in _TUPLES:
            self.stack.append(tuple(self.pop(_TUPLES[name])))
        elif name in _OPERATIONS:
            _OPERATIONS[name](self, argument)
        else:
            raise DataError(f"it uses the operation {name}: expected only plain containers and bytes")

    def pop(self, count: int) -> list[Any]:
        if len(self.stack) < count:
            raise ValueError("its stack is empty")
        values = self.stack[len(self.stack) - count :]
        del self.stack[len(self.stack) - count :]
        return values

    def since_mark(self) -> list[Any]:
        values: list[Any] = []
        while not isinstance(value := self.stack.pop(), _Mark):
            values.append(value)
        return values[::-1]


def _append(machine: _Machine, values: list[Any]) -> None:
    target = machine.stack[-1]
    if type(target) is not list:
        raise ValueError("it appends to something that is not a list")
    target += values


def _set(machine: _Machine, values: list[Any]) -> None:
    target = machine.stack[-1]
    # Only strings are keys: the hash of a deeply nested tuple overflows the C stack.
    if type(target) is not dict or not all(type(key) in (str, bytes) for key in values[::2]):
        raise ValueError("it sets an item of something that is not a dict with string keys")
    target |= dict(zip(values[::2], values[1::2], strict=True))


def _collect(start: list[Any] | dict[Any, Any], fill: Callable[[_Machine, list[Any]], None]) -> Any:
    """LIST and DICT of protocol 0: a new container of everything since the mark."""

    def operation(machine: _Machine, _: Any) -> None:
        values = machine.since_mark()
        machine.stack.append(type(start)())
        fill(machine, values)

    return operation


def _name(machine: _Machine, argument: Any) -> None:
    """GLOBAL has module and name in its argument, STACK_GLOBAL has them on the stack."""
    module, name = machine.pop(2) if argument is None else argument.split(" ", 1)
    if type(module) is not str or type(name) is not str:
        raise ValueError("it asks for a name that is not text")
    found = _Name(module, name)
    if found not in _NAMES:
        raise DataError(
            f"it asks for {found.module}.{found.name}: expected only arrays of bytes and plain containers"
        )
    machine.stack.append(found)


def _call(machine: _Machine, _: Any) -> None:
    function, arguments = machine.pop(2)
    if type(function) is not _Name or type(arguments) is not tuple:
        raise ValueError("it calls something that is not a function")
    if function == _ENCODE and len(arguments) == 2 and all(type(argument) is str for argument in arguments):
        # How Python 3 writes bytes in protocol 2.
        if arguments[1] != "latin1":
            raise DataError(f"it has text in the encoding {arguments[1]!r}: expected 'latin1'")
        machine.stack.append(arguments[0].encode("latin1"))
    elif function == _DTYPE:
        if arguments != ("u1", False, True):
            raise DataError("it has an array of another type: expected uint8")
        machine.stack.append(_Byte())
    elif function in _RECONSTRUCT and arguments in ((_NDARRAY, (0,), "b"), (_NDARRAY, (0,), b"b")):
        machine.stack.append(Block())
    else:
        raise ValueError("it makes a call that does not restore an array")


def _build(machine: _Machine, _: Any) -> None:
    target, state = machine.pop(2)
    machine.stack.append(target)
    if isinstance(target, _Byte):
        if state != _OF_BYTES:
            raise DataError("its array has a modified type: expected plain uint8")
        return
    if not isinstance(target, Block):
        raise ValueError("it sets the state of something that is not an array")
    _, shape, kind, fortran, content = state
    content = content.encode("latin1") if type(content) is str else content
    whole = type(shape) is tuple and all(type(side) is int and side >= 0 for side in shape)
    if not whole or type(content) is not bytes or not isinstance(kind, _Byte) or type(fortran) is not bool:
        raise DataError("its array is not plain bytes: expected uint8")
    if prod(shape) != len(content):
        raise ValueError(f"its array {shape} has {len(content):,} bytes")
    target.shape, target.fortran, target.content = shape, fortran, content


_SKIPPED = {"PROTO", "FRAME"}
_CONSTANTS: dict[str, Callable[[], Any]] = {
    "MARK": _Mark,
    "NONE": lambda: None,
    "NEWTRUE": lambda: True,
    "NEWFALSE": lambda: False,
    "EMPTY_DICT": dict,
    "EMPTY_LIST": list,
}
_VALUES = {
    *("INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "FLOAT", "BINFLOAT"),
    *("STRING", "SHORT_BINSTRING", "BINSTRING", "UNICODE", "SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8"),
    *("SHORT_BINBYTES", "BINBYTES", "BINBYTES8"),
}
_TUPLES = {"EMPTY_TUPLE": 0, "TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_OPERATIONS: dict[str, Callable[[_Machine, Any], None]] = {
    "TUPLE": lambda machine, _: machine.stack.append(tuple(machine.since_mark())),
    "LIST": _collect([], _append),
    "DICT": _collect({}, _set),
    "APPEND": lambda machine, _: _append(machine, machine.pop(1)),
    "APPENDS": lambda machine, _: _append(machine, machine.since_mark()),
    "SETITEM": lambda machine, _: _set(machine, machine.pop(2)),
    "SETITEMS": lambda machine, _: _set(machine, machine.since_mark()),
    "GLOBAL": _name,
    "STACK_GLOBAL": _name,
    "REDUCE": _call,
    "BUILD": _build,
}
