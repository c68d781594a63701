"""Adapters on a frozen base, through the real PEFT and back: LoHa is FedPara, LoRA is LowRank."""

from copy import deepcopy

import peft
import pytest
import torch
from torch import Tensor, nn

import fedpara as fp
from fedpara.errors import SchemeError, UsageError
from fedpara.interop.peft import load_adapter, read_adapter, write_adapter
from fedpara.parameterization import compose_state, forms

SCHEMES = {
    "loha": fp.FedPara(rank=3),
    "loha reshaped": fp.FedPara(rank=3, conv="reshape"),
    "lora": fp.LowRank(rank=3, conv="reshape"),
}


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(16, 24, 3)
        self.point = nn.Conv2d(24, 24, 1)
        self.line = nn.Conv1d(24, 24, 3)
        self.fc = nn.Linear(24, 20)
        self.norm = nn.LayerNorm(20)
        self.classifier = nn.Linear(20, 20)

    def forward(self, x: Tensor) -> Tensor:
        y = self.point(self.conv(x)).flatten(2)
        scores: Tensor = self.classifier(self.norm(self.fc(self.line(y).mean(2))))
        return scores


X = torch.randn(4, 16, 6, 6, generator=torch.Generator().manual_seed(0))


def base() -> Network:
    torch.manual_seed(0)
    return Network()


def trained(scheme: fp.parameterization.Scheme, alpha: float | None = 6) -> nn.Module:
    model = fp.factorize(base(), scheme, onto="frozen", alpha=alpha, train=("classifier",))
    step(model)
    return model


def step(model: nn.Module) -> None:
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.Adam(parameters, lr=0.02)
    for _ in range(3):
        optimizer.zero_grad()
        (model(X) - 1).square().mean().backward()
        optimizer.step()


def close(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("scheme", SCHEMES.values(), ids=SCHEMES)
@pytest.mark.parametrize("alpha", [None, 6, 0.5])
def test_peft_reads_our_adapter_with_its_trained_head(tmp_path, scheme, alpha):
    model = trained(scheme, alpha)
    write_adapter(tmp_path, model)
    adapted = peft.PeftModel.from_pretrained(base(), tmp_path).eval()
    close(adapted(X), model(X))
    close(adapted.merge_and_unload()(X), fp.merge(model)(X))
    assert not torch.allclose(model(X), base()(X), atol=1e-2)


@pytest.mark.parametrize("scheme", SCHEMES.values(), ids=SCHEMES)
def test_what_is_written_is_loaded_again_on_a_plain_or_an_adapted_model(tmp_path, scheme):
    model = trained(scheme)
    write_adapter(tmp_path, model)
    plain = load_adapter(tmp_path, base())
    other = fp.factorize(base(), scheme, onto="frozen", alpha=12, train=("classifier",))
    for again in (plain, load_adapter(tmp_path, other)):
        close(again(X), model(X))
        if scheme.conv == "tensor":
            continue  # PEFT has no core for a 1x1 kernel, so the forms of `point` differ
        assert {n: f.rank for n, f in forms(again).items()} == {n: f.rank for n, f in forms(model).items()}
        assert [p.requires_grad for p in again.state_dict(keep_vars=True).values()] == [
            p.requires_grad for p in model.state_dict(keep_vars=True).values()
        ]
    step(plain)
    assert torch.equal(plain.state_dict()["fc.weight.base"], base().fc.weight)


@pytest.mark.parametrize("rslora", [False, True])
def test_we_read_pefts_lora(tmp_path, rslora):
    config = peft.LoraConfig(
        r=4,
        lora_alpha=6,
        target_modules=["conv", "line", "fc"],
        rank_pattern={"fc": 2},
        modules_to_save=["classifier"],
        init_lora_weights=False,
        use_rslora=rslora,
    )
    torch.manual_seed(1)
    theirs = peft.get_peft_model(base(), config).eval()
    theirs.save_pretrained(tmp_path)
    ours = load_adapter(tmp_path, base())
    close(ours(X), theirs(X))
    state, read = read_adapter(tmp_path, base())
    whole = compose_state(state, read)
    for layer in ("conv", "line", "fc"):
        module = theirs.base_model.model.get_submodule(layer)
        close(whole[f"{layer}.weight"], module.get_delta_weight("default"))


def test_we_load_pefts_loha(tmp_path):
    config = peft.LoHaConfig(r=3, alpha=6, target_modules=["conv", "fc"], init_weights=False)
    torch.manual_seed(1)
    theirs = peft.get_peft_model(base(), config).eval()
    theirs.save_pretrained(tmp_path)
    ours = load_adapter(tmp_path, base())
    close(ours(X), theirs(X))
    assert forms(ours)["fc.weight"].scale == 2.0
    step(ours)


def test_what_peft_cannot_hold_is_refused(tmp_path):
    refused = {
        "LowRank with conv": fp.factorize(base(), fp.LowRank(rank=3), onto="frozen"),
        "fc has factors and other trained": fp.factorize(
            base(), fp.FedPara(rank=3), onto="frozen", train=("fc.bias",)
        ),
        "either LoHa or LoRA": fp.factorize(
            base(),
            fp.FedPara(rank=3),
            lambda n, m, p: n in ("fc", "classifier") and (fp.LowRank(rank=3) if n == "fc" else True),
            onto="frozen",
        ),
    }
    for said, model in refused.items():
        with pytest.raises(SchemeError, match=said):
            write_adapter(tmp_path / "a", model)
    write_adapter(tmp_path, trained(fp.LowRank(rank=3, conv="reshape")))
    other = fp.factorize(base(), fp.LowRank(rank=3), lambda n, m, p: n == "fc", onto="frozen")
    before = deepcopy(other.state_dict())
    with pytest.raises(UsageError, match="other adapters"):
        load_adapter(tmp_path, other)
    assert all(torch.equal(before[name], tensor) for name, tensor in other.state_dict().items())
