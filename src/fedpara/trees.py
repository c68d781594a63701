"""Trees of tensors: a tensor, or a tuple or dict of trees. A model's inputs, outputs and targets are trees.

inputs of a model:   a tensor x: model(x);   a tuple: model(*x);   a dict: model(**x)
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

Tree = Any
"""Tensor | tuple[Tree, ...] | dict[str, Tree]"""


def map_tree(f: Callable[..., Any], tree: Tree, *others: Tree) -> Tree:
    """`f` applied to every tensor. `others` have the same structure; `f` gets their tensors too."""
    if isinstance(tree, dict):
        return {name: map_tree(f, part, *(other[name] for other in others)) for name, part in tree.items()}
    if isinstance(tree, tuple):
        return tuple(map_tree(f, *parts) for parts in zip(tree, *others, strict=True))
    return f(tree, *others)


def leaves(tree: Tree) -> list[Tensor]:
    """The tensors, in order."""
    found: list[Tensor] = []
    map_tree(found.append, tree)
    return found


def take(tree: Tree, index: Tensor) -> Tree:
    """The rows at `index` of every tensor."""
    return map_tree(lambda tensor: tensor.index_select(0, index), tree)


def rows(tree: Tree, part: slice) -> Tree:
    """A range of rows of every tensor, without a copy."""
    return map_tree(lambda tensor: tensor[part], tree)


def join(trees: Sequence[Tree]) -> Tree:
    """Trees with the same structure, joined along the first dimension."""
    return map_tree(lambda *tensors: torch.cat(tensors), *trees)


def stack(trees: Sequence[Tree]) -> Tree:
    return map_tree(lambda *tensors: torch.stack(tensors), *trees)


def to_device(tree: Tree, device: torch.device) -> Tree:
    return map_tree(lambda tensor: tensor.to(device), tree)


def describe(tree: Tree) -> str:
    """Types and shapes for a message, such as "float32 [8, 3]" or "{ids: int64 [8, 16]}"."""
    if isinstance(tree, dict):
        return "{" + ", ".join(f"{name}: {describe(part)}" for name, part in tree.items()) + "}"
    if isinstance(tree, tuple):
        return "(" + ", ".join(map(describe, tree)) + ")"
    if not isinstance(tree, Tensor):
        return type(tree).__name__
    return f"{str(tree.dtype).removeprefix('torch.')} {list(tree.shape)}"


def arguments(inputs: Tree) -> tuple[tuple[Tree, ...], dict[str, Tree]]:
    """(args, kwargs) with which a model is called on these inputs."""
    if isinstance(inputs, dict):
        return (), inputs
    return (inputs if isinstance(inputs, tuple) else (inputs,)), {}
