"""Export a merged model to safetensors, ONNX, or a torch.export program (pt2).

Each file is read back and compared with torch before it gets its final name. Safetensors must match bit for bit.
The outputs of ONNX (with onnxruntime) and pt2 (with torch.export.load) must match at several batch sizes. If the source
says how raw inputs are normalised, ONNX and pt2 contain it: they take raw inputs.
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

from fedpara.errors import FedParaError, MissingExtraError, UsageError, in_a_line, install
from fedpara.files import replacing
from fedpara.interop.preprocessing import Normalised, Preprocessing
from fedpara.interop.rebuild import Description, rebuild, refuse_misfit, shape_of
from fedpara.interop.saved import SavedState, read_state, save_state
from fedpara.parameterization import load, merge
from fedpara.state import State, nbytes

Format = Literal["safetensors", "onnx", "pt2"]
Inputs = tuple[Tensor, ...]
Runner = Callable[[Inputs], list[Tensor]]

ONNX_BYTES = 1536 << 20
"""Above this size torch writes the weights of an ONNX model to a second file."""

UNTRACEABLE = (
    "expected a network that torch.export can trace with a dynamic batch size. Safetensors needs no tracing."
)
UNSUPPORTED = (
    "expected a type that onnxruntime computes in, such as float32. Use model.float() or another format."
)


@dataclass(frozen=True)
class ExportReport:
    """What was written.

    `parameters` counts every number in the merged state, buffers included. `max_difference` is the largest
    difference between the outputs and torch's. Safetensors computes no outputs, so it is None there.

    `inputs` has the type and the shape of each input, without the batch; it is empty if they are unknown.
    `normalises` says whether the file takes raw inputs and normalises them itself. `preprocessing` is the source's.
    """

    path: Path
    format: Format
    bytes: int
    parameters: int
    max_difference: float | None
    inputs: tuple[tuple[str, tuple[int, ...]], ...] = ()
    normalises: bool = False
    preprocessing: Preprocessing | None = None


def export(
    source: SavedState | nn.Module,
    path: str | os.PathLike[str],
    format: Format = "safetensors",
    *,
    model: nn.Module | None = None,
    example: Tensor | Inputs | None = None,
    overwrite: bool = False,
    tolerance: float = 1e-4,
    normalise: bool = True,
) -> ExportReport:
    """Write the merged `source` to `path` and report what was written.

    ONNX and pt2 need the network. It is `source` itself, a plain `model` (a copy of it gets the weights), or the
    model of this package that the saved state describes. They also need an `example` input, batch first. If the
    description has the input's shape, the default is a random example. The batch size stays dynamic.
    `tolerance` bounds the difference between the outputs, relative to the largest output if that is above 1.

    If the state has a `preprocessing`, ONNX and pt2 take raw inputs of its type, and `example` is raw too. Safetensors
    keeps it in the metadata. `normalise=False` exports the bare network, which takes normalised inputs.

    A state that does not fit the network is a StateError. A `target` that the state names is never called: pass
    `model=build_target(target)` if you trust it.
    """
    path = Path(path)
    if format not in get_args(Format):
        raise UsageError(f"unknown format {format!r}: expected one of {', '.join(get_args(Format))}.")
    if os.path.lexists(path) and not overwrite:
        raise UsageError(f"{path} exists: choose another name (--out), or replace it (--overwrite).")
    preprocessing = None if isinstance(source, nn.Module) else source.preprocessing
    inside = preprocessing if normalise else None
    difference: float | None = None
    with replacing(path) as temporary:
        if format == "safetensors":
            state, inputs = _write_safetensors(source, model, example, inside, temporary)
        else:
            network, description = _network(source, model)
            state = network.state_dict()
            inputs = _inputs(network, example, description, inside)
            if inside is not None:
                network = Normalised(network, inside)
            run = (_write_onnx if format == "onnx" else _write_pt2)(network, inputs, temporary)
            difference = _difference(network, run, inputs, format, tolerance)
    return ExportReport(
        path,
        format,
        path.stat().st_size,
        parameters=sum(tensor.numel() for tensor in state.values()),
        max_difference=difference,
        inputs=tuple((str(x.dtype).removeprefix("torch."), tuple(x.shape[1:])) for x in inputs),
        normalises=inside is not None and format != "safetensors",
        preprocessing=preprocessing,
    )


def _network(source: SavedState | nn.Module, model: nn.Module | None) -> tuple[nn.Module, Description | None]:
    if isinstance(source, nn.Module):
        return merge(source).cpu().eval(), None
    if model is None and source.model is None:
        raise UsageError("the state does not name its network: give the plain model, or export safetensors.")
    network = deepcopy(model) if model is not None else rebuild(source.model or {})
    state = source.merged()
    refuse_misfit(state, network, _name(source, model))
    load(network, state)
    return network.cpu().eval(), source.model


def _name(source: SavedState, model: nn.Module | None) -> str:
    named = source.model or {}
    return type(model).__name__ if model is not None else str(named.get("name", named.get("target")))


def _inputs(
    network: nn.Module,
    example: Tensor | Inputs | None,
    description: Description | None,
    preprocessing: Preprocessing | None,
) -> Inputs:
    """Two examples or more: torch.export would treat a batch size of one as a constant."""
    if example is not None:
        given = (example,) if isinstance(example, Tensor) else example
        return tuple(x if len(x) > 1 else torch.cat([x, x]) for x in given)
    shape = shape_of(description) if description else None
    if shape is None:
        raise UsageError(
            "the inputs of the network are unknown: in Python, pass `example` to `export`, with a tensor per input of "
            "`forward`, batch first."
        )
    generator = torch.Generator().manual_seed(0)
    if preprocessing is not None:
        return (preprocessing.example(shape, generator),)
    # A leaf: a transformer's own positions do not say what it takes.
    leaves = (m for m in network.modules() if not list(m.children()))
    first = next((m for m in leaves if list(m.parameters())), None)
    if isinstance(first, nn.Embedding):
        return (torch.randint(first.num_embeddings, (2, *shape), generator=generator),)
    return (torch.randn(2, *shape, generator=generator),)


def _write_safetensors(
    source: SavedState | nn.Module,
    model: nn.Module | None,
    example: Tensor | Inputs | None,
    preprocessing: Preprocessing | None,
    path: Path,
) -> tuple[State, Inputs]:
    """Reading the file back compares every bit with the checksum of the state in memory."""
    inputs: Inputs = ()
    if isinstance(source, nn.Module):
        source = SavedState(merge(source).cpu().state_dict())
    state, shape = source.merged(), shape_of(source.model or {})
    if model is not None or "name" in (source.model or {}):
        with torch.random.fork_rng(devices=[]):
            network = model if model is not None else rebuild(source.model or {})
        refuse_misfit(state, network, _name(source, model))
        if shape is not None:
            inputs = _inputs(network, None, source.model, None)
    elif shape is not None and source.preprocessing is not None:
        # Images, whose type is known without the network.
        inputs = (torch.empty(2, *shape),)
    if not inputs and example is not None:
        inputs = (example,) if isinstance(example, Tensor) else example
    save_state(path, state, {}, model=source.model, preprocessing=preprocessing)
    read_state(path)
    return state, inputs


def _write_onnx(network: nn.Module, inputs: Inputs, path: Path) -> Runner:
    try:
        import onnx  # noqa: F401
        import onnxruntime
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise MissingExtraError(f"ONNX export needs the package {error.name}: {install('onnx')}") from error
    if nbytes(network.state_dict()) > ONNX_BYTES:
        raise UsageError("the model is too large for one ONNX file: export safetensors or pt2.")
    with _explained(network, "cannot be exported as ONNX", UNTRACEABLE), _quiet():
        program: Any = torch.onnx.export(
            network, inputs, dynamo=True, dynamic_shapes=_free_batch(inputs), verbose=False
        )
    # Each node carries stack traces with file paths of this machine.
    for node in program.model.graph.all_nodes():
        node.metadata_props.clear()
    program.save(path, external_data=False)
    with _explained(network, "does not run in onnxruntime", UNSUPPORTED):
        session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    names = [entry.name for entry in session.get_inputs()]

    def run(inputs: Inputs) -> list[Tensor]:
        feed = {name: x.numpy() for name, x in zip(names, inputs, strict=True)}
        with _explained(network, "does not run in onnxruntime", UNSUPPORTED):
            return [torch.from_numpy(y) for y in session.run(None, feed)]

    return run


def _write_pt2(network: nn.Module, inputs: Inputs, path: Path) -> Runner:
    with _explained(network, "cannot be exported as pt2", UNTRACEABLE):
        traced = torch.export.export(network, inputs, dynamic_shapes=_free_batch(inputs))
    for node in traced.graph.nodes:
        node.meta.pop("stack_trace", None)
    # Not directly to the path: on a full disk torch's file writer aborts the process.
    content = io.BytesIO()
    torch.export.save(traced, content)
    path.write_bytes(content.getbuffer())
    program = torch.export.load(path).module()
    return lambda inputs: _tensors(program(*inputs))


def _free_batch(inputs: Inputs) -> Any:
    """The first dimension of every input is the batch, and all inputs share its size."""
    batch = torch.export.Dim("batch")
    return tuple({0: batch} for _ in inputs)


@contextmanager
def _explained(network: nn.Module, problem: str, cure: str) -> Iterator[None]:
    """Turn an error of another library into a UsageError."""
    named = network.network if isinstance(network, Normalised) else network
    try:
        yield
    except Exception as error:
        raise UsageError(f"{type(named).__name__} {problem} ({in_a_line(error)}): {cure}") from error


@contextmanager
def _quiet() -> Iterator[None]:
    """Hide messages of torch 2.13: about its own tree specs, inputs that share a batch size, and torchvision."""

    def wanted(record: logging.LogRecord) -> bool:
        return "torchvision is not installed" not in record.getMessage()

    logger = logging.getLogger("torch.onnx._internal.exporter._registration")
    logger.addFilter(wanted)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings(
                "ignore", r"`isinstance\(treespec, LeafSpec\)` is deprecated", FutureWarning
            )
            warnings.filterwarnings("ignore", r"(?s).*The axis name: batch will not be used", UserWarning)
            yield
    finally:
        logger.removeFilter(wanted)


def _difference(network: nn.Module, run: Runner, inputs: Inputs, format: str, tolerance: float) -> float:
    """The largest difference over batches of one, the example's size, and twice that size."""
    worst = 0.0
    for batch in (tuple(x[:1] for x in inputs), inputs, tuple(torch.cat([x, x]) for x in inputs)):
        with torch.no_grad():
            expected, given = _tensors(network(*batch)), run(batch)
        for y, z in zip(expected, given, strict=True):
            difference = _distance(y, z)
            largest = float(y.double().abs().max()) if y.numel() else 0.0
            if not difference <= tolerance * max(1.0, largest):
                raise FedParaError(
                    f"the {format} model differs from torch by {difference:.2e} in outputs of up to {largest:.2e}. "
                    f"Nothing was written. To accept it, raise the tolerance of {tolerance:g}."
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
        raise UsageError(f"the model returns {type(output).__name__}: expected a tensor or a tuple of them.")
    return tensors
