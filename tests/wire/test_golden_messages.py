"""Golden: the bytes of lossy messages, written before tensors were rounded together. A run must stay the same run."""

from hashlib import sha256

import numpy as np
import pytest
import torch

from fedpara.state import State
from fedpara.wire import Header, make_message

DIGESTS = {
    "float16": "0038da4c6c4ebfaa",
    "bfloat16": "0ec18301a1f8ac8e",
    "int8": "7174bf626db7a2f7",
    "int4": "bbc54273c1b7c3c7",
    "int2": "1817da9eaab2219e",
    "ternary": "72479a8883eb3637",
    "int4(block=16)": "9bb6bb0ccf381eaf",
    "topk(0.1)": "cde37944e441a35c",
    "topk(0.01)": "c8ecb7f9b083c5aa",
}


def a_state() -> State:
    """Several types and sizes, an empty tensor, zeros, subnormal numbers, a transposed tensor."""
    rng = np.random.default_rng(0)

    def normal(*shape: int, scale: float = 1.0, dtype: type = np.float32) -> torch.Tensor:
        return torch.from_numpy(np.asarray(rng.normal(size=shape) * scale, dtype=dtype))

    return {
        **{f"layer.{i}.x1": normal(16 * (i + 1), 12, scale=10.0**-i) for i in range(5)},
        "bias": normal(10),
        "wide": normal(20, 30, dtype=np.float64),
        "half": normal(1000).half(),
        "steps": torch.arange(7),
        "small": torch.arange(-5, 5, dtype=torch.int8),
        "empty": torch.empty(0, 3),
        "zero": torch.zeros(400),
        "tiny": normal(500, scale=1e-42),
        "turned": normal(30, 40).T,
        "running_var": normal(300).abs(),
    }


@pytest.mark.parametrize("link", DIGESTS)
def test_the_bytes_of_a_message(link: str) -> None:
    header = Header(3, "fedavg", "fedpara", "client:5", 20)
    generator = torch.Generator().manual_seed(11)
    message = bytes(make_message(a_state(), header, link, generator, frozenset({"running_var"})))
    assert sha256(message).hexdigest()[:16] == DIGESTS[link]
