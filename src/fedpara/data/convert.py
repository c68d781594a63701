"""as_examples: Examples from tensors, NumPy arrays, a torch Dataset, a Hugging Face data set or an Arrow table.

An item of a data set is (input, target), or a dict whose target has one of the names in TARGETS. Inputs are tensors,
numbers, images, or tuples or dicts of them. Items of different lengths need a `collate`, which pads them.
"""

from collections.abc import Callable, Sequence
from numbers import Real
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import default_collate

from fedpara.data.examples import Examples
from fedpara.errors import DataError, in_a_line
from fedpara.trees import Tree, leaves

TARGETS = ("target", "targets", "label", "labels")
Collate = Callable[[list[Any]], Any]


def as_examples(
    source: Any,
    *,
    collate: Collate | None = None,
    classes: int | None = None,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
) -> Examples:
    """The examples of one client or test set. `collate` gets the list of all items and returns (inputs, targets)."""
    if isinstance(source, Examples):
        return source
    try:
        inputs, targets = _read(source, collate)
    except DataError:
        raise
    except Exception as error:  # a data set may raise anything
        raise DataError(in_a_line(error)) from error
    return Examples(inputs, targets, classes, mean=mean, std=std)


def in_memory(source: Any) -> bool:
    """Whether the source is tensors or arrays that are in memory already."""
    if isinstance(source, Examples):
        return True
    return _is_pair(source) and all(
        isinstance(part, Tensor) or (isinstance(part, np.ndarray) and not isinstance(part, np.memmap))
        for part in _flat(source)
    )


def count(source: Any) -> int | None:
    """The number of examples, if it is known without reading them."""
    if _is_pair(source):
        return len(_flat(source)[0])
    return len(source) if hasattr(source, "__len__") else None


def _read(source: Any, collate: Collate | None) -> tuple[Tree, Tree]:
    if _is_pair(source):
        return _tensors(source[0]), _tensors(source[1])
    if hasattr(source, "to_pylist"):  # an Arrow table
        source = source.to_pylist()
    if not hasattr(source, "__getitem__") or not hasattr(source, "__len__"):
        raise DataError(
            f"a client's data is {type(source).__name__}: expected (inputs, targets), or a data set with a length and "
            "items."
        )
    items = [source[i] for i in range(len(source))]
    if not items:
        raise DataError("the data set is empty: leave this client out.")
    return _pair((collate or _default_collate)(items))


def _default_collate(items: list[Any]) -> Any:
    try:
        return default_collate([_plain(item) for item in items])
    except RuntimeError as error:  # torch's message for unequal sizes is long
        raise DataError(
            f"items differ in size ({in_a_line(error)}): give a `collate` that pads them."
        ) from None


def _plain(item: Any) -> Any:
    """An item whose fields are tensors: an image uint8 [C, H, W], a list of numbers one tensor."""
    if isinstance(item, dict):
        return {name: _field(part) for name, part in item.items()}
    if isinstance(item, tuple | list):
        return tuple(map(_field, item))
    return _field(item)


def _field(item: Any) -> Any:
    if isinstance(item, dict | tuple):
        return _plain(item)
    if type(item) is float or (isinstance(item, list) and _numbers(item)):
        return torch.tensor(item)  # Python's floats have torch's default type, not float64
    if hasattr(item, "getbands"):  # a Pillow image
        pixels = np.array(item)
        return torch.from_numpy(pixels[None] if pixels.ndim == 2 else pixels.transpose(2, 0, 1).copy())
    return item


def _numbers(item: Any) -> bool:
    return all(map(_numbers, item)) if isinstance(item, list) else isinstance(item, Real)


def _pair(made: Any) -> tuple[Tree, Tree]:
    """(inputs, targets) from what a collate returned."""
    if isinstance(made, dict):
        names = [name for name in TARGETS if name in made]
        if not names or len(made) < 2:
            raise DataError(
                f"items have the fields {', '.join(made)}: expected inputs and a target called {', '.join(TARGETS)}."
            )
        inputs = {name: part for name, part in made.items() if name != names[0]}
        only = next(iter(inputs.values())) if len(inputs) == 1 else inputs
        return _tensors(only), _tensors(made[names[0]])
    if isinstance(made, tuple | list) and len(made) == 2:
        return _tensors(made[0]), _tensors(made[1])
    what = f"{len(made)} parts" if isinstance(made, tuple | list) else type(made).__name__
    raise DataError(f"an item has {what}: expected (input, target) or a dict with a target.")


def _is_pair(source: Any) -> bool:
    """Whether the source is (inputs, targets) as arrays, and not a data set of two items."""
    return (
        isinstance(source, tuple)
        and len(source) == 2
        and bool(_flat(source))
        and all(isinstance(part, Tensor | np.ndarray) for part in _flat(source))
    )


def _flat(tree: Any) -> list[Any]:
    if isinstance(tree, dict):
        return [leaf for part in tree.values() for leaf in _flat(part)]
    if isinstance(tree, tuple | list):
        return [leaf for part in tree for leaf in _flat(part)]
    return [tree]


def _tensors(tree: Any) -> Tree:
    if isinstance(tree, dict):
        return {str(name): _tensors(part) for name, part in tree.items()}
    if isinstance(tree, tuple | list):
        return tuple(map(_tensors, tree))
    if isinstance(tree, Tensor):
        return tree
    array = np.asarray(tree)
    if array.dtype == object or array.dtype.kind in "US":
        what = "text" if array.dtype.kind in "US" else "lists of different lengths or other objects"
        raise DataError(f"a field holds {what}: give a `collate` that turns them into tensors.")
    # A copy: a memory map is read here, and torch warns about sharing read-only arrays.
    return torch.from_numpy(np.array(array))


def same_kind(a: Examples, b: Examples) -> bool:
    """Whether one example of each has the same structure, shapes and types."""
    trees = [(part.inputs, part.targets) for part in (a, b)]
    kinds = [[(leaf.dtype, leaf.shape[1:]) for leaf in leaves(tree)] for tree in trees]
    return kinds[0] == kinds[1] and _structure(trees[0]) == _structure(trees[1])


def _structure(tree: Tree) -> Any:
    if isinstance(tree, dict):
        return {name: _structure(part) for name, part in tree.items()}
    return tuple(map(_structure, tree)) if isinstance(tree, tuple) else None
