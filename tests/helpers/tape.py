"""Tape: records a step on the CPU as a CUDA graph would, and replays it without its Python code.

A replay repeats the recorded operations of torch on the recorded tensors. Numbers that Python computed stay as they
were. Recording leaves every tensor and the generator as they were, and refuses to read a tensor's value.
"""

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

aten = torch.ops.aten
READS = (aten._local_scalar_dense.default, aten.equal.default, aten.nonzero.default)
UNDECLARED = {aten.native_batch_norm.default: (3, 4)}  # arguments that it writes to


def tensors(tree):
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def storages(tree):
    return {tensor.untyped_storage().data_ptr() for tensor in tensors(tree)}


class Tape:
    """A `Recorder`. `warmed` and `recorded` count its calls, `replayed` those of its replays."""

    def __init__(self):
        self.warmed = self.recorded = self.replayed = 0

    def warm_up(self, step):
        self.warmed += 1
        step()

    def record(self, step):
        mode, generator = _Recording(), torch.get_rng_state()
        try:
            with mode:
                step()
        finally:
            with torch.no_grad():
                for tensor, old in mode.before:
                    tensor.copy_(old)
            torch.set_rng_state(generator)
        self.recorded += 1

        def replay():
            self.replayed += 1
            with torch._C._AutoDispatchBelowAutograd():
                for function, arguments, keywords, made in mode.calls:
                    again = function(*arguments, **keywords)
                    for old, new in zip(made, tensors(again), strict=True):
                        if old is not None:
                            old.copy_(new)

        return replay


class _Recording(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.calls, self.before, self.inside = [], [], set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function in READS:
            raise RuntimeError("operation not permitted when stream is capturing")
        written = [args[i] for i in UNDECLARED.get(function, ()) if i < len(args)]
        for i, argument in enumerate(function._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                written.append(args[i] if i < len(args) else kwargs.get(argument.name))
        for tensor in tensors(written):
            if not storages(tensor) & self.inside:
                self.inside |= storages(tensor)
                self.before.append((tensor, tensor.clone()))
        made = function(*args, **kwargs)
        new = [None if storages(t) & storages((args, kwargs)) else t for t in tensors(made)]
        self.inside |= storages(new)
        if written or storages(new):  # a view shows what its base holds
            self.calls.append((function, args, kwargs, new))
        return made
