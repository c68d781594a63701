"""The merged model for other runtimes: safetensors, ONNX, or a torch.export program (pt2).

What is written is read again and compared with torch before it takes its name: safetensors bit for bit,
ONNX with onnxruntime and pt2 with torch.export.load, on inputs of several batch sizes.
"""

import io
import logging
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from fedpara.errors import FedParaError, MissingExtraError, UsageError, in_a_line, install
from fedpara.files import replacing
from fedpara.interop.rebuild import Description, rebuild, refuse_misfit, shape_of
from fedpara.interop.saved import SavedState, read_state, save_state
from fedpara.parameterization import forms, load, merge, refuse_old_norms
from fedpara.state import State, nbytes

Format = Literal["safetensors", "onnx", "pt2"]
Inputs = tuple[Tensor, ...]
Runner = Callable[[Inputs], list[Tensor]]

ONNX_BYTES = 1536 << 20
"""Above this torch puts the weights of an ONNX model into a second file."""


@dataclass(frozen=True)
class ExportReport:
    """`parameters` counts every number of the merged state, the buffers of a BatchNorm too. `max_difference` is that
    of the outputs: None for safetensors, which computes none.
    """

    path: Path
    format: Format
    bytes: int
    parameters: int
    max_difference: float | None


def export(
    source: SavedState | nn.Module,
    path: str | os.PathLike[str],
    format: Format = "safetensors",
    *,
    model: nn.Module | None = None,
    example: Tensor | Inputs | None = None,
    overwrite: bool = False,
    tolerance: float = 1e-4,
) -> ExportReport:
    """Write the merged `source` to `path` and report what was written.

    ONNX and pt2 need the network: `source` itself, `model` (plain, its weights are replaced in a copy), or the
    model of this package that the saved state describes. They also need an `example` of its input, batch first; it
    is drawn at random where the description says its shape. The batch is left free. `tolerance` bounds the
    difference of the outputs, relative to the largest where that is above 1.

    A state that does not fit the network is refused. A `target` that the state names is never called: pass
    `model=build_target(target)` if you trust it.
    """
    path = Path(path)
    if not isinstance(source, SavedState | nn.Module):
        raise UsageError(
            f"the source is of type {type(source).__name__}: expected a torch.nn.Module, or a SavedState, which "
            "holds a state and its forms."
        )
    if not isinstance(tolerance, int | float) or not tolerance > 0:
        raise UsageError(f"the tolerance is {tolerance!r}: expected a number above 0.")
    if format not in get_args(Format):
        raise UsageError(f"unknown format {format!r}: expected one of {', '.join(get_args(Format))}.")
    if path.is_dir():
        raise UsageError(
            f"{path} is a folder: expected the name of a file, such as {path / f'model.{format}'}."
        )
    if os.path.lexists(path) and not overwrite:
        raise UsageError(f"{path} exists: choose another name (--out), or have it replaced (--overwrite).")
    difference: float | None
    with replacing(path) as temporary:
        if format == "safetensors":
            state = _write_safetensors(source, model, temporary)
            difference = None
        else:
            network, description = _network(source, model)
            state = network.state_dict()
            inputs = _inputs(network, example, description)
            run = (_write_onnx if format == "onnx" else _write_pt2)(network, inputs, temporary)
            difference = _difference(network, run, inputs, format, tolerance)
    numbers = sum(tensor.numel() for tensor in state.values())
    return ExportReport(path, format, path.stat().st_size, numbers, difference)


def _plain(model: nn.Module) -> nn.Module:
    refuse_old_norms(model)
    if any(map(is_lazy, model.parameters())):
        raise UsageError(
            f"{type(model).__name__} is lazy and not initialised yet: expected a model with weights. Run a batch "
            "through it first."
        )
    if any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers())):
        raise UsageError(
            f"{type(model).__name__} is on the meta device and holds no numbers: expected a model with weights."
        )
    return (merge(model) if forms(model) else deepcopy(model)).cpu().eval()


def _network(source: SavedState | nn.Module, model: nn.Module | None) -> tuple[nn.Module, Description | None]:
    if isinstance(source, nn.Module):
        return _plain(source), None
    if model is None and source.model is None:
        raise UsageError(
            "the state does not say which network it belongs to, which ONNX and pt2 need: give the plain model, "
            "or export safetensors."
        )
    network = deepcopy(model) if model is not None else rebuild(source.model or {})
    state = source.merged()
    refuse_misfit(state, network, _name(source, model))
    load(network, state)
    return network.cpu().eval(), source.model


def _name(source: SavedState, model: nn.Module | None) -> str:
    said = source.model or {}
    return type(model).__name__ if model is not None else str(said.get("name", said.get("target")))


def _inputs(network: nn.Module, example: Tensor | Inputs | None, description: Description | None) -> Inputs:
    """Two examples or more: torch.export takes a batch of one for a constant."""
    if example is not None:
        given = (example,) if isinstance(example, Tensor) else example
        if not isinstance(given, tuple | list) or not all(isinstance(x, Tensor) and x.dim() for x in given):
            raise UsageError("the example is no batch: expected a tensor, or a tuple of them, batch first.")
        return tuple(x if len(x) > 1 else torch.cat([x, x]) for x in given)
    shape = shape_of(description) if description else None
    if shape is None:
        raise UsageError(
            f"the shape of an input of {type(network).__name__} is not known: give an example, batch first."
        )
    first = next((m for m in network.modules() if list(m.parameters(recurse=False))), None)
    generator = torch.Generator().manual_seed(0)
    if isinstance(first, nn.Embedding):
        return (torch.randint(first.num_embeddings, (2, *shape), generator=generator),)
    return (torch.randn(2, *shape, generator=generator),)


def _write_safetensors(source: SavedState | nn.Module, model: nn.Module | None, path: Path) -> State:
    """Equal to the last bit or StateError: the file is read again against the checksum of what was meant."""
    if isinstance(source, nn.Module):
        source = SavedState(_plain(source).state_dict())
    state = source.merged()
    if model is not None or "name" in (source.model or {}):
        with torch.random.fork_rng(devices=[]):
            network = model if model is not None else rebuild(source.model or {})
        refuse_misfit(state, network, _name(source, model))
    save_state(path, state, {}, model=source.model)
    read_state(path)
    return state


def _write_onnx(network: nn.Module, inputs: Inputs, path: Path) -> Runner:
    try:
        import onnx  # noqa: F401
        import onnxruntime
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise MissingExtraError(f"ONNX export needs the package {error.name}: {install('onnx')}") from error
    if nbytes(network.state_dict()) > ONNX_BYTES:
        raise UsageError(
            f"the model holds {nbytes(network.state_dict()):,} bytes: one ONNX file takes up to {ONNX_BYTES:,}. "
            "Export safetensors or pt2."
        )
    with _traced(network, "ONNX"), _quiet():
        program = torch.onnx.export(
            network, inputs, dynamo=True, dynamic_shapes=_free_batch(inputs), verbose=False
        )
    assert program is not None
    # The notes on each node are stack traces, with the paths of the machine that exported.
    for node in program.model.graph.all_nodes():
        node.metadata_props.clear()
    program.save(path, external_data=False)
    with _run_by_onnxruntime(network):
        session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    names = [entry.name for entry in session.get_inputs()]

    def run(inputs: Inputs) -> list[Tensor]:
        feed = {name: x.numpy() for name, x in zip(names, inputs, strict=True)}
        with _run_by_onnxruntime(network):
            return [torch.from_numpy(y) for y in session.run(None, feed)]

    return run


def _write_pt2(network: nn.Module, inputs: Inputs, path: Path) -> Runner:
    with _traced(network, "pt2"):
        traced = torch.export.export(network, inputs, dynamic_shapes=_free_batch(inputs))
    for node in traced.graph.nodes:
        node.meta.pop("stack_trace", None)
    # torch's own writer of files aborts the process on a full disk.
    content = io.BytesIO()
    torch.export.save(traced, content)
    path.write_bytes(content.getbuffer())
    program = torch.export.load(path).module()
    return lambda inputs: _tensors(program(*inputs))


def _free_batch(inputs: Inputs) -> Any:
    """The first dimension of every input is the one batch."""
    batch = torch.export.Dim("batch")
    return tuple({0: batch} for _ in inputs)


@contextmanager
def _traced(network: nn.Module, format: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise UsageError(
            f"{type(network).__name__} could not be exported as {format} ({in_a_line(error)}): expected a network "
            "that torch.export can trace with a free batch size. Safetensors needs no tracing."
        ) from error


@contextmanager
def _run_by_onnxruntime(network: nn.Module) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise UsageError(
            f"onnxruntime does not run {type(network).__name__} ({in_a_line(error)}): expected a network and an "
            "example of one type that it computes in, such as float32. Use model.float(), or another format."
        ) from error


@contextmanager
def _quiet() -> Iterator[None]:
    """torch 2.13 warns about its own tree specs, and logs the operators of a torchvision that is not there."""

    def wanted(record: logging.LogRecord) -> bool:
        return "torchvision is not installed" not in record.getMessage()

    logger = logging.getLogger("torch.onnx._internal.exporter._registration")
    logger.addFilter(wanted)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings(
                "ignore", r"`isinstance\(treespec, LeafSpec\)` is deprecated", FutureWarning
            )
            yield
    finally:
        logger.removeFilter(wanted)


def _difference(network: nn.Module, run: Runner, inputs: Inputs, format: str, tolerance: float) -> float:
    """The largest difference over a batch of one, the example's own, and twice that."""
    worst = 0.0
    for batch in (tuple(x[:1] for x in inputs), inputs, tuple(torch.cat([x, x]) for x in inputs)):
        with torch.no_grad():
            expected, given = _tensors(network(*batch)), run(batch)
        for y, z in zip(expected, given, strict=True):
            difference = _distance(y, z)
            largest = float(y.double().abs().max()) if y.numel() else 0.0
            if not difference <= tolerance * max(1.0, largest):
                raise FedParaError(
                    f"the {format} model differs from torch by {difference:.2e} in outputs of up to {largest:.2e}: "
                    f"expected at most {tolerance:g} of it. Nothing was written; raise the tolerance if that is enough."
                )
            worst = max(worst, difference)
    return worst


def _distance(a: Tensor, b: Tensor) -> float:
    if a.shape != b.shape:
        return float("inf")
    return float((a.double() - b.double()).abs().max()) if a.numel() else 0.0


def _tensors(output: object) -> list[Tensor]:
    leaves: Sequence[object] = output if isinstance(output, list | tuple) else [output]
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    if len(tensors) != len(leaves):
        raise UsageError(
            f"the model returns {type(output).__name__}: expected a tensor or a tuple of tensors, to compare."
        )
    return tensors
