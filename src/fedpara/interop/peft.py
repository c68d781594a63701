"""W = (w1_a w1_b) * (w2_a w2_b): FedPara's factors as LoHa adapters of Hugging Face PEFT.

    weight                               PEFT                                 here
    Linear, 1x1 or reshaped kernel       w1_a [O, r], w1_b [r, n]             X1 [O, r], Y1 [n, r]^T
    kernel (Prop. 3)                     w1_a [r, O], w1_b [r, I], t1         X1^T, Y1^T, T1

PEFT adds the composed weight to the base model's weight. On a base that holds `base_state(state, forms)`, where
those weights are 0, the adapter gives the factorized model; on any other base it is a delta. An adapter holds no
biases, norms or dense layers: these belong to the base.
"""

import json
import os
import re
from collections import Counter, defaultdict
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fedpara.errors import SchemeError, StateError, UsageError, in_a_line
from fedpara.files import make_folder, read_tensors, replacing, write_tensors
from fedpara.interop.saved import check_factors
from fedpara.parameterization import FedPara, Form, covered, write
from fedpara.parameterization import forms as forms_of
from fedpara.state import State

WEIGHTS = "adapter_model.safetensors"
CONFIG = "adapter_config.json"
PREFIX = "base_model.model."
MATRIX = {"hada_w1_a", "hada_w1_b", "hada_w2_a", "hada_w2_b"}
KERNEL = MATRIX | {"hada_t1", "hada_t2"}


def write_adapter(
    folder: str | os.PathLike[str],
    source: nn.Module | Mapping[str, Tensor],
    forms: Mapping[str, Form] | None = None,
    *,
    overwrite: bool = False,
) -> None:
    """Write the factorized weights of a model, or of a state and its forms, as a LoHa adapter.

    Supports FedPara without nonlinearity, on Linear, Conv2d and Conv1d. Alpha equals the rank, so PEFT's scale is 1.
    """
    folder = Path(folder)
    model = source if isinstance(source, nn.Module) else None
    if model is not None:
        state, forms = model.state_dict(), forms_of(model)
    else:
        state = dict(source)  # type: ignore[arg-type]
    if not forms:
        raise UsageError("no factorized weight: expected a factorized model, or a state and its forms.")
    check_factors(state, forms)
    if obstacle := _obstacle(forms, model):
        raise SchemeError(f"{obstacle}: leave it dense with `where`, or merge the model and export that.")
    if not overwrite and any((folder / name).exists() for name in (WEIGHTS, CONFIG)):
        raise UsageError(f"{folder} holds an adapter: choose another folder, or pass overwrite=True.")
    tensors: State = {}
    for weight, form in forms.items():
        factors = [state[f"{weight}.{factor}"].detach().cpu() for factor in form.factors]
        for name, tensor in _to_hada(form, factors).items():
            tensors[f"{PREFIX}{_module(weight)}.{name}"] = tensor.clone(memory_format=torch.contiguous_format)
    make_folder(folder, cure="another one")
    write_tensors(folder / WEIGHTS, tensors, {"format": "pt"})
    with replacing(folder / CONFIG) as temporary:
        temporary.write_text(json.dumps(_config(forms), indent=2) + "\n", encoding="utf-8")


def read_adapter(
    folder: str | os.PathLike[str], base: nn.Module | None = None
) -> tuple[State, dict[str, Form]]:
    """The factors and forms of a LoHa adapter. Its scale alpha / r is multiplied into X1.

    The file alone cannot tell a reshaped or 1x1 kernel from a matrix, nor a Conv1d kernel from one of width [k, 1].
    With the `base` model, the forms get the shapes of its weights.
    """
    folder = Path(folder)
    tensors, _ = read_tensors(folder / WEIGHTS)
    shapes = {name: tuple(tensor.shape) for name, tensor in base.state_dict().items()} if base else None
    try:
        config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
        if config["peft_type"] != "LOHA":
            raise ValueError(f"peft_type is {config['peft_type']!r}, not 'LOHA'")
        return _understand(tensors, config, shapes)
    except Exception as error:  # a foreign file may break any assumption
        raise StateError(
            f"the adapter in {folder} cannot be read ({in_a_line(error)}): expected a LoHa adapter with {CONFIG} and "
            f"{WEIGHTS} as PEFT saved them, made for this base."
        ) from error


def _understand(
    tensors: State, config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]] | None
) -> tuple[State, dict[str, Form]]:
    """Raises on anything unusual; `read_adapter` turns that into one error."""
    layers: defaultdict[str, State] = defaultdict(dict)
    for key, tensor in tensors.items():
        module, _, name = key.removeprefix(PREFIX).rpartition(".")
        layers[module][name] = tensor
    state: State = {}
    forms: dict[str, Form] = {}
    for module, hada in layers.items():
        if hada.keys() not in (MATRIX, KERNEL):
            raise ValueError(f"{module} has the tensors {sorted(hada)}, not those of a LoHa layer alone")
        weight = f"{module}.weight"
        factors, shape = _from_hada(module, hada, shapes[weight] if shapes else None)
        r = factors["x1"].shape[1]
        factors["x1"] = factors["x1"] * _scale(config, module, r)
        reshaped = "t1" not in factors and len(shape) > 2
        forms[weight] = write(FedPara(rank=r, conv="reshape" if reshaped else "tensor"), shape, r)
        state |= {f"{weight}.{name}": factor.contiguous() for name, factor in factors.items()}
    check_factors(state, forms)
    return state, forms


def base_state(state: Mapping[str, Tensor], forms: Mapping[str, Form]) -> State:
    """The state of a plain base that the adapter completes: every factorized weight is 0."""
    taken = {f"{weight}.{factor}" for weight, form in forms.items() for factor in form.factors}
    rest = {name: tensor for name, tensor in state.items() if name not in taken}
    return rest | {
        weight: state[f"{weight}.{next(iter(form.factors))}"].new_zeros(form.shape)
        for weight, form in forms.items()
    }


def _obstacle(forms: Mapping[str, Form], model: nn.Module | None) -> str:
    """Why PEFT could not use the adapter, or "". It would fail there, or silently give other outputs."""
    for weight, form in forms.items():
        if type(form.scheme) is not FedPara or form.scheme.nonlinearity is not None:
            return f"{weight} is written by {form.scheme}, and a LoHa adapter is FedPara without nonlinearity"
        if not weight.endswith(".weight") or not 2 <= len(form.shape) <= 4:
            return f"{weight} {form.shape} is not the `weight` of a Linear, Conv1d or Conv2d inside a model"
        if model is None:
            continue
        layer, parent = (model.get_submodule(name) for name in (_module(weight), _module(_module(weight))))
        if not isinstance(layer, nn.Linear | nn.Conv1d | nn.Conv2d):
            kind = type(layer).__mro__[1].__name__
            return (
                f"{weight} belongs to a layer of type {kind}, and PEFT's LoHa takes Linear, Conv1d and Conv2d"
            )
        if isinstance(parent, nn.MultiheadAttention | nn.TransformerEncoderLayer):
            return (
                f"{weight} is read directly by its {type(parent).__name__}, which would bypass PEFT's layer"
            )
    if model is not None and (over := covered(model)):
        return f"{over} has another parametrization on top of its factors, which an adapter cannot hold"
    if len(_styles(forms)) > 1:
        return 'the kernels mix conv="tensor" and conv="reshape", and an adapter has one style (use_effective_conv2d)'
    return ""


def _styles(forms: Mapping[str, Form]) -> set[bool]:
    """Whether the kernels have cores. PEFT never uses one for a 1x1 kernel, so those do not count."""
    return {form.is_kernel for form in forms.values() if prod(form.shape[2:]) > 1}


def _to_hada(form: Form, factors: list[Tensor]) -> State:
    each = len(factors) // 2
    hada: State = {}
    for i, (x, y, *core) in enumerate((factors[:each], factors[each:]), start=1):
        if core and prod(form.shape[2:]) > 1:
            # PEFT keeps a Conv1d's core [r, r, k, 1].
            hada[f"hada_t{i}"] = core[0].reshape(form.rank, form.rank, form.shape[2], -1)
            hada[f"hada_w{i}_a"] = x.mT
        else:
            # PEFT has no core for a 1x1 kernel: X T Y^T = (X T) Y^T.
            hada[f"hada_w{i}_a"] = x @ core[0].reshape(form.rank, form.rank) if core else x
        hada[f"hada_w{i}_b"] = y.mT
    return hada


def _from_hada(module: str, hada: State, shape: tuple[int, ...] | None) -> tuple[State, tuple[int, ...]]:
    """x1 y1 [t1] x2 y2 [t2], and the shape of the weight: `shape` if the base is known."""
    kernel = hada.keys() == KERNEL
    factors: State = {}
    for i in (1, 2):
        x, y = hada[f"hada_w{i}_a"], hada[f"hada_w{i}_b"]
        factors |= {f"x{i}": x.mT if kernel else x, f"y{i}": y.mT}
        if kernel:
            factors[f"t{i}"] = hada[f"hada_t{i}"]
    own: tuple[int, ...] = (factors["x1"].shape[0], factors["y1"].shape[0])
    if kernel:
        own += tuple(hada["hada_t1"].shape[2:])
    if shape is None:
        return factors, own
    if shape[0] != own[0] or prod(shape) != prod(own) or (kernel and len(shape) == 2):
        raise ValueError(f"{module} has shape {own} in the adapter and {shape} in the base")
    for name in ("t1", "t2") if kernel else ():
        factors[name] = factors[name].reshape(*factors[name].shape[:2], *shape[2:])
    return factors, shape


def _module(weight: str) -> str:
    return weight.rpartition(".")[0]


def _config(forms: Mapping[str, Form]) -> dict[str, object]:
    """PEFT's config. Module names are anchored patterns: a bare `fc` would also match `head.fc`."""
    r = Counter(form.rank for form in forms.values()).most_common(1)[0][0]
    own = {f"^{re.escape(_module(weight))}": form.rank for weight, form in forms.items() if form.rank != r}
    return {
        "peft_type": "LOHA",
        "task_type": None,
        "base_model_name_or_path": None,
        "inference_mode": True,
        "r": r,
        "alpha": r,
        "rank_pattern": own,
        "alpha_pattern": own,
        "target_modules": "|".join(re.escape(_module(weight)) for weight in forms),
        "use_effective_conv2d": True in _styles(forms),
        "rank_dropout": 0.0,
        "module_dropout": 0.0,
        "init_weights": True,
    }


def _scale(config: Mapping[str, Any], module: str, r: int) -> float:
    """alpha / r, each from the first pattern that matches the module, as PEFT looks them up."""
    rank = _looked_up(config.get("rank_pattern"), module, config["r"])
    alpha: float = _looked_up(config.get("alpha_pattern"), module, config["alpha"])
    if rank != r:
        raise ValueError(f"{CONFIG} gives {module} rank {rank!r}, and its tensors have rank {r}")
    return alpha / r


def _looked_up(patterns: Any, module: str, default: Any) -> Any:
    matches = [value for key, value in (patterns or {}).items() if re.match(rf"(.*\.)?({key})$", module)]
    return matches[0] if matches else default
