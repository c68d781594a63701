"""One layer's factors as PEFT's tensors, and back.

weight                               PEFT                                 here
LoHa: Linear, 1x1, reshaped kernel   w1_a [O, r], w1_b [r, n]             X1 [O, r], Y1 [n, r]^T
LoHa: kernel (Prop. 3)               w1_a [r, O], w1_b [r, I], t1         X1^T, Y1^T, T1
LoRA: Linear                         B [O, r], A [r, n]                   X [O, r], Y [n, r]^T
LoRA: reshaped kernel                B [O, r, 1, 1], A [r, I, k1, k2]     X [O, r], Y [I k, r]^T
"""

from math import prod

from torch import Tensor

from fedpara.parameterization import FedPara, Form, LowRank, Scheme
from fedpara.state import State

Shape = tuple[int, ...]

LOHA, LORA = "LOHA", "LORA"
MATRIX = {"hada_w1_a", "hada_w1_b", "hada_w2_a", "hada_w2_b"}
KERNEL = MATRIX | {"hada_t1", "hada_t2"}
PAIR = {"lora_A.weight", "lora_B.weight"}
SCHEMES: dict[str, type[FedPara | LowRank]] = {LOHA: FedPara, LORA: LowRank}
NAMES: dict[str, tuple[str, list[set[str]]]] = {LOHA: ("LoHa", [MATRIX, KERNEL]), LORA: ("LoRA", [PAIR])}


def kind_of(scheme: Scheme) -> str:
    """PEFT's type of adapter for this scheme, or ""."""
    if type(scheme) is FedPara and scheme.nonlinearity is None:
        return LOHA
    return LORA if type(scheme) is LowRank else ""


def to_peft(form: Form, factors: list[Tensor]) -> State:
    """PEFT's tensors of one layer."""
    if kind_of(form.scheme) == LOHA:
        return _to_hada(form, factors)
    x, y, *core = factors
    x = _with_core(form, x, core)
    point = (1,) * (len(form.shape) - 2)
    return {
        "lora_A.weight": y.mT.reshape(form.rank, *form.shape[1:]),
        "lora_B.weight": x.reshape(*x.shape, *point),
    }


def from_peft(kind: str, module: str, tensors: State, shape: Shape | None) -> tuple[State, Shape]:
    """Our factors, and the shape of the weight: `shape` if the base is known."""
    name, layouts = NAMES[kind]
    if set(tensors) not in layouts:
        raise ValueError(f"{module} has the tensors {sorted(tensors)}, not those of a {name} layer alone")
    factors, own = _from_hada(tensors) if kind == LOHA else _from_lora(tensors)
    if shape is None:
        return factors, own
    kernel = kind == LOHA and "t1" in factors
    if shape[0] != own[0] or prod(shape) != prod(own) or (kernel and len(shape) == 2):
        raise ValueError(f"{module} has shape {own} in the adapter and {shape} in the base")
    for core in ("t1", "t2") if kernel else ():
        factors[core] = factors[core].reshape(*factors[core].shape[:2], *shape[2:])
    return factors, shape


def _to_hada(form: Form, factors: list[Tensor]) -> State:
    each = len(factors) // 2
    hada: State = {}
    for i, (x, y, *core) in enumerate((factors[:each], factors[each:]), start=1):
        if core and prod(form.shape[2:]) > 1:
            # PEFT keeps a Conv1d's core [r, r, k, 1].
            hada[f"hada_t{i}"] = core[0].reshape(form.rank, form.rank, form.shape[2], -1)
            hada[f"hada_w{i}_a"] = x.mT
        else:
            hada[f"hada_w{i}_a"] = _with_core(form, x, core)
        hada[f"hada_w{i}_b"] = y.mT
    return hada


def _with_core(form: Form, x: Tensor, core: list[Tensor]) -> Tensor:
    """PEFT has no core for a 1x1 kernel: X T Y^T = (X T) Y^T."""
    return x @ core[0].reshape(form.rank, form.rank) if core else x


def _from_hada(hada: State) -> tuple[State, Shape]:
    """x1 y1 [t1] x2 y2 [t2], and the weight's shape as far as the tensors show it."""
    kernel = hada.keys() == KERNEL
    factors: State = {}
    for i in (1, 2):
        x, y = hada[f"hada_w{i}_a"], hada[f"hada_w{i}_b"]
        factors |= {f"x{i}": x.mT if kernel else x, f"y{i}": y.mT}
        if kernel:
            factors[f"t{i}"] = hada[f"hada_t{i}"]
    own: Shape = (factors["x1"].shape[0], factors["y1"].shape[0])
    return factors, own + tuple(hada["hada_t1"].shape[2:]) if kernel else own


def _from_lora(lora: State) -> tuple[State, Shape]:
    a, b = lora["lora_A.weight"], lora["lora_B.weight"]
    return {"x": b.flatten(1), "y": a.flatten(1).mT}, (b.shape[0], *a.shape[1:])
