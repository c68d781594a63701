"""Contract of admit: a valid update passes, and each mistake is rejected with its reason."""

import math
from typing import Any

import pytest
import torch

from fedpara.errors import UpdateRejected, UsageError, WireError
from fedpara.state import State
from fedpara.wire import Header, admit, encode, spec_of

HEADER = Header(round=3, method="fedavg", scheme="fedpara(0.1)", sender="client:17", examples=500)
STATE: State = {
    "z.weight": torch.tensor([[3.0, 0.0], [0.0, 0.0]]),
    "a.bias": torch.tensor([4.0]),
    "counter": torch.tensor(10**9),
}


def judge(state: State, header: Header = HEADER, dtype: str = "float32", **how: Any) -> tuple[Header, State]:
    message = encode(state, header, dtype, torch.Generator().manual_seed(0))
    wanted: dict[str, Any] = {
        "spec": spec_of(STATE),
        "round": 3,
        "method": "fedavg",
        "scheme": "fedpara(0.1)",
        "link": dtype,
    }
    return admit(message, **(wanted | how))


def test_a_valid_update_passes_in_the_order_of_the_spec() -> None:
    header, state = judge(STATE)
    assert header == HEADER
    assert list(state) == list(STATE)
    assert all(torch.equal(state[name], STATE[name]) for name in STATE)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "int8"])
def test_a_quantized_update_passes(dtype: str) -> None:
    state = judge(STATE, dtype=dtype)[1]
    torch.testing.assert_close(state["z.weight"], STATE["z.weight"])


@pytest.mark.parametrize(
    ("sent", "agreed"), [("int8", "float32"), ("float32", "int8"), ("float16", "bfloat16")]
)
def test_another_precision_than_the_links_is_rejected(sent: str, agreed: str) -> None:
    with pytest.raises(WireError, match=f"a message of precision '{sent}': expected {agreed}"):
        judge(STATE, dtype=sent, link=agreed)


def test_float64_is_expected_as_it_was_sent() -> None:
    state = {"w": torch.tensor([1 / 3], dtype=torch.float64)}
    assert torch.equal(judge(state, spec=spec_of(state))[1]["w"], state["w"])
    assert judge(state, dtype="float16", spec=spec_of(state, "float16"))[1]["w"].dtype == torch.float32
    with pytest.raises(UpdateRejected, match=r"'w' has type torch.float32: expected torch.float64"):
        judge({"w": state["w"].float()}, spec=spec_of(state))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"a.bias": None}, "lacks 'a.bias'"),
        ({"extra": torch.zeros(1)}, "also holds 'extra'"),
        ({"control/a.bias": torch.zeros(1)}, "also holds 'control/a.bias'"),
        ({"a.bias": torch.zeros(2)}, r"'a.bias' has shape \(2,\): expected \(1,\)"),
        ({"a.bias": torch.zeros(())}, r"'a.bias' has shape \(\): expected \(1,\)"),
        ({"a.bias": torch.zeros(1, dtype=torch.int32)}, r"type torch.int32: expected torch.float32"),
        ({"a.bias": torch.zeros(1, dtype=torch.float64)}, r"type torch.float64: expected torch.float32"),
        ({"counter": torch.tensor(1.0)}, r"'counter' has type torch.float32: expected torch.int64"),
        ({"a.bias": torch.tensor([math.nan])}, "'a.bias' holds NaN"),
        ({"a.bias": torch.tensor([-math.inf])}, "'a.bias' holds NaN or infinity"),
    ],
)
def test_wrong_tensors_are_rejected_by_name(change: dict[str, torch.Tensor | None], reason: str) -> None:
    state = {name: tensor for name, tensor in {**STATE, **change}.items() if tensor is not None}
    with pytest.raises(UpdateRejected, match=rf"message of 'client:17', round 3, refused: .*{reason}"):
        judge(state)


@pytest.mark.parametrize(
    ("header", "reason"),
    [
        (Header(4, "fedavg", "fedpara(0.1)", "client:1", 5), "round is 4: expected 3"),
        (Header(3, "scaffold", "fedpara(0.1)", "client:1", 5), "method is 'scaffold': expected 'fedavg'"),
        (Header(3, "fedavg", "original", "client:1", 5), r"scheme is 'original': expected 'fedpara\(0.1\)'"),
        (Header(3, "fedavg", "fedpara(0.1)", "client:1", 0), "0 examples"),
    ],
)
def test_wrong_headers_are_rejected(header: Header, reason: str) -> None:
    with pytest.raises(UpdateRejected, match=reason):
        judge(STATE, header)


def test_the_server_needs_no_examples() -> None:
    header = Header(3, "fedavg", "fedpara(0.1)")
    assert judge(STATE, header)[0] == header


def test_norm_bound_is_on_the_change_of_floating_tensors() -> None:
    # 3-4-5: the counter of 1e9 does not count.
    judge(STATE, max_norm=5.0)
    with pytest.raises(UpdateRejected, match=r"norm is 5: expected at most 4\.9"):
        judge(STATE, max_norm=4.9)
    near = {name: tensor + 1 if name == "a.bias" else tensor for name, tensor in STATE.items()}
    judge(STATE, max_norm=1.0, reference=near)
    with pytest.raises(UpdateRejected, match="norm is 1"):
        judge(STATE, max_norm=0.9, reference=near)
    judge(STATE, max_norm=4.0, reference={"z.weight": STATE["z.weight"]})
    with pytest.raises(UpdateRejected, match="norm is 4"):
        judge(STATE, max_norm=3.9, reference={"z.weight": STATE["z.weight"]})


def test_a_norm_bound_must_be_positive() -> None:
    for bound in (0.0, -1.0, math.nan):
        with pytest.raises(UsageError, match="max_norm"):
            judge(STATE, max_norm=bound)


def test_a_variance_may_be_zero_but_not_negative() -> None:
    """A feature that never varies, such as a pixel in the corner, has variance 0."""
    state = {"norm.running_var": torch.tensor([0.0, 1.0])}
    assert torch.equal(judge(state, spec=spec_of(state))[1]["norm.running_var"], state["norm.running_var"])
    with pytest.raises(UpdateRejected, match=r"'norm\.running_var' holds a negative variance"):
        judge({"norm.running_var": torch.tensor([-1e-9, 1.0])}, spec=spec_of(state))
