"""admit: check a received message before anything uses it.

The checks, in order: the link's encoding; round, method and scheme; the client's number of examples; names, shapes,
types and finite values against the spec; no negative BatchNorm variance; ||state - reference|| <= max_norm. The error
names the first check that fails.
"""

from typing import NoReturn

import torch

from fedpara.errors import UpdateRejected, UsageError
from fedpara.state import State, all_finite, finite
from fedpara.wire.codec import AnyMessage, Header, decode
from fedpara.wire.coded import Spec
from fedpara.wire.rows import VARIANCE, RowMessage
from fedpara.wire.tensors import shown


def spec_of(state: State, dtype: str = "float32", exact: frozenset[str] = frozenset()) -> Spec:
    """The types and shapes that `decode` returns for this state. Only "float32" and `exact` names keep float64."""
    spec: Spec = {}
    for name, tensor in state.items():
        wide = tensor.dtype == torch.float64 and (dtype == "float32" or name in exact)
        unchanged = not tensor.is_floating_point() or wide
        spec[name] = (tensor.dtype if unchanged else torch.float32, tensor.shape)
    return spec


def admit(
    message: AnyMessage,
    *,
    spec: Spec,
    round: int,
    method: str,
    scheme: str,
    link: str,
    examples: int | None = None,
    max_norm: float | None = None,
    reference: State | None = None,
    exact: frozenset[str] = frozenset(),
    since: int | None = None,
) -> tuple[Header, State]:
    """The header, and the state in the order of the spec.

    WireError if the message cannot be decoded, UpdateRejected if a check fails. The norm is over the floating-point
    tensors; a tensor that is missing from the reference, such as the change of a control variate, counts in full.
    """
    if max_norm is not None and not max_norm > 0:
        raise UsageError(f"max_norm is {max_norm}: expected a positive bound, or None for no bound.")
    header, state = decode(message, exact, link, spec)
    _check_header(header, round, method, scheme, examples, since)
    _check_names(header, state, spec)
    for name, (dtype, shape) in spec.items():
        tensor = state[name]
        if tensor.shape != shape:
            _refuse(header, f"{name!r} has shape {tuple(tensor.shape)}: expected {tuple(shape)}")
        if tensor.dtype != dtype:
            _refuse(header, f"{name!r} has type {tensor.dtype}: expected {dtype}")
    if not finite(state):
        bad = next(name for name, tensor in state.items() if not all_finite(tensor))
        _refuse(header, f"{bad!r} holds NaN or infinity: expected finite values")
    variances = {name: tensor.reshape(-1) for name, tensor in state.items() if name.endswith(VARIANCE)}
    if variances and bool((torch.cat(list(variances.values())) < 0).any()):
        bad = next(name for name, tensor in variances.items() if bool((tensor < 0).any()))
        _refuse(header, f"{bad!r} holds a negative variance: expected 0 or more")
    if max_norm is not None:
        norm = _distance(state, reference or {})
        if not norm <= max_norm:
            _refuse(header, f"its norm is {norm:.6g}: expected at most {max_norm:.6g}")
    return header, {name: state[name] for name in spec}


def admit_row(
    message: RowMessage, *, spec: Spec, round: int, method: str, scheme: str, examples: int
) -> Header:
    """`admit` for a message in `Rows`, without cutting out its tensors. The link is "float32", without max_norm."""
    header = message.header
    _check_header(header, round, method, scheme, examples)
    if message.rows.spec != spec or not message.sound:
        admit(message, spec=spec, round=round, method=method, scheme=scheme, link="float32")
    return header


def _check_header(
    header: Header, round: int, method: str, scheme: str, examples: int | None, since: int | None = None
) -> None:
    wanted = {"round": round, "method": method, "scheme": scheme, "since": since}
    for field, expected in wanted.items():
        if getattr(header, field) != expected:
            _refuse(header, f"its {field} is {shown(getattr(header, field))}: expected {expected!r}")
    if header.sender != "server" and header.examples == 0:
        _refuse(header, "it claims 0 examples: expected at least 1")
    if examples is not None and header.examples != examples:
        _refuse(header, f"it claims {header.examples} examples: expected {examples}")


def _refuse(header: Header, reason: str) -> NoReturn:
    raise UpdateRejected(f"message of {shown(header.sender)}, round {header.round}, refused: {reason}.")


def _check_names(header: Header, state: State, spec: Spec) -> None:
    for what, names in (("lacks", spec.keys() - state.keys()), ("also holds", state.keys() - spec.keys())):
        if names:
            listed = ", ".join(shown(name) for name in sorted(names)[:5]) + (" ..." if len(names) > 5 else "")
            _refuse(header, f"it {what} {listed}: expected the {len(spec)} tensors of the spec and no other")


def _distance(state: State, reference: State) -> float:
    """sqrt(sum ||a - b||^2) in float64"""
    norms = [
        torch.linalg.vector_norm(
            tensor - reference[name].to(tensor.device) if name in reference else tensor, dtype=torch.float64
        )
        for name, tensor in state.items()
        if tensor.is_floating_point()
    ]
    return float(torch.linalg.vector_norm(torch.stack(norms))) if norms else 0.0
