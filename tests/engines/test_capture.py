"""What a second start finds in the compiler's cache. The rest of `capture.py` needs a GPU: `test_gpu.py`."""

import shutil
from collections import Counter

import pytest
import torch
from torch._dynamo.utils import counters
from torch.func import functional_call, grad, vmap

from fedpara.engines import capture


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler")
def test_a_stacked_step_comes_whole_out_of_the_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    model = torch.nn.Linear(3, 2)
    state = {name: torch.randn(2, *p.shape) for name, p in model.named_parameters()}
    x = torch.randn(2, 4, 3)

    def loss(state, x):
        with torch.autocast("cpu", torch.bfloat16):
            return functional_call(model, state, (x,)).square().mean()

    def compiled(context):
        torch._dynamo.reset()
        before = Counter(counters["aot_autograd"])
        with context:
            torch.compile(lambda: vmap(grad(loss))(state, x), dynamic=False)()
        return Counter(counters["aot_autograd"]) - before

    first, second = (compiled(capture.cached_whole()) for _ in range(2))
    assert (first["autograd_cache_miss"], second["autograd_cache_hit"]) == (1, 1)
    assert first["autograd_cache_bypass"] == second["autograd_cache_bypass"] == 0
