"""Which buffers a training step may change. The others are constants: they never travel.

The rule reads the code of the model's modules. So the server and its clients agree without any data.

    changes     the statistics of torch's norm layers, such as BatchNorm
    changes     a buffer whose name some method other than __init__ may write: self.mean = ..., self.mean[i] = ...,
                self.mean.copy_(...), out=self.mean, or another name for it (mean = self.mean)
    changes     all buffers of a module whose code cannot be read, or reaches buffers by computed names
    constant    all others: position ids, causal masks, rotary tables, an adapter's W0

In doubt a buffer counts as changing: sending it costs bytes, but losing a change would falsify the result. The step
that `checks` makes before a run finds a write that this rule misses, such as one in a hook.
"""

import ast
import inspect
from collections.abc import Iterator
from functools import cache
from textwrap import dedent

import torch
from torch import Tensor, nn

from fedpara.parameterization import is_adapter

ANY = "*"
"""Stands for every name, where the code does not show which."""
SILENT = ("torch.nn.modules.", "torch.nn.utils.parametrize")
"""Modules of torch whose only changing buffers are the statistics of norm layers."""
UPDATING = ("batch_norm", "instance_norm")
"""Functions that write to their arguments."""


def changing_buffers(model: nn.Module) -> set[int]:
    """The ids of the buffers that a step may change."""
    norms, others = set[int](), list[tuple[nn.Module, str, Tensor]]()
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            if isinstance(module, nn.modules.batchnorm._NormBase):
                norms.add(id(buffer))
            elif not is_adapter(module):
                others.append((module, name, buffer))
    if not others:  # reading the code of a large package takes a second
        return norms
    written = {id(module): _written(type(module)) for module in model.modules()}  # type: ignore[arg-type]
    anywhere = frozenset().union(*written.values()) - {ANY}
    return norms | {
        id(buffer) for module, name, buffer in others if name in anywhere or ANY in written[id(module)]
    }


@cache
def _written(kind: type) -> frozenset[str]:
    """The attributes that methods of this class may write."""
    if issubclass(kind, torch.jit.ScriptModule):
        return frozenset({ANY})
    own = (c for c in kind.__mro__ if issubclass(c, nn.Module) and c is not nn.Module)
    return frozenset(name for c in own if not c.__module__.startswith(SILENT) for name in _written_by(c))


def _written_by(kind: type) -> Iterator[str]:
    try:
        (tree,) = ast.parse(dedent(inspect.getsource(kind))).body
    except (OSError, TypeError, SyntaxError, ValueError):
        yield ANY
        return
    methods = (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
    for method in methods:
        if method.name != "__init__":
            for node in ast.walk(method):
                yield from _targets(node)


def _targets(node: ast.AST) -> Iterator[str]:
    match node:
        case ast.Attribute(attr=name, ctx=ast.Store() | ast.Del()):
            yield name
        case ast.Attribute(attr="_buffers" | "buffers" | "named_buffers" | "__dict__"):
            yield ANY
        case ast.Subscript(value=value, ctx=ast.Store() | ast.Del()):
            yield from _attributes(value)
        case ast.Assign(value=value) | ast.NamedExpr(value=value) | ast.For(iter=value):
            yield from _aliases(value)
        case ast.Call(func=function, args=arguments, keywords=keywords):
            called = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
            if called in ("getattr", "setattr", "register_buffer"):
                text = arguments[called != "register_buffer"] if len(arguments) > 1 else None
                yield str(text.value) if isinstance(text, ast.Constant) else ANY
            if isinstance(function, ast.Attribute) and called.endswith("_") and not called.endswith("__"):
                yield from _attributes(function.value)
            for argument in keywords if called not in UPDATING else (*arguments, *keywords):
                if called in UPDATING or getattr(argument, "arg", "") == "out":
                    yield from _attributes(argument)


def _attributes(node: ast.AST) -> Iterator[str]:
    return (part.attr for part in ast.walk(node) if isinstance(part, ast.Attribute))


def _aliases(value: ast.AST) -> Iterator[str]:
    """The attributes that an assignment gives another name."""
    match value:
        case ast.Attribute(attr=name):
            yield name
        case ast.IfExp(body=body, orelse=other):
            yield from (*_aliases(body), *_aliases(other))
        case ast.Tuple(elts=parts) | ast.List(elts=parts):
            for part in parts:
                yield from _aliases(part)
