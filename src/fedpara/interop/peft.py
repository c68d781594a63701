"""Adapters of Hugging Face PEFT: FedPara's factors are LoHa, LowRank's are LoRA.

    LoHa    W = W0 + (alpha / r) (w1_a w1_b) * (w2_a w2_b)
    LoRA    W = W0 + (alpha / r) B A

PEFT adds the composed weight to the base model's weight, as `factorize(..., onto="frozen")` does. The factors of a
model without a frozen base are an adapter of a base that holds `base_state(state, forms)`, where these weights are 0.
An adapter also holds the other modules that train (PEFT's modules_to_save), if the model has a frozen base. Otherwise
biases, norms and dense layers belong to the base.
"""

import json
import os
import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from fedpara.errors import SchemeError, StateError, UsageError, in_a_line
from fedpara.files import make_folder, read_tensors, replacing, write_tensors
from fedpara.interop.peft_layers import LOHA, LORA, SCHEMES, from_peft, kind_of, to_peft
from fedpara.interop.saved import check_factors
from fedpara.parameterization import Form, covered, factorize, write
from fedpara.parameterization import forms as forms_of
from fedpara.parameterization.naming import BASE
from fedpara.state import State

M = TypeVar("M", bound=nn.Module)

WEIGHTS = "adapter_model.safetensors"
CONFIG = "adapter_config.json"
PREFIX = "base_model.model."


def write_adapter(
    folder: str | os.PathLike[str],
    source: nn.Module | Mapping[str, Tensor],
    forms: Mapping[str, Form] | None = None,
    *,
    overwrite: bool = False,
) -> None:
    """Write the factorized weights of a model, or of a state and its forms, as a LoHa or LoRA adapter.

    Supports FedPara without nonlinearity (LoHa) and LowRank with conv="reshape" (LoRA), on Linear, Conv2d and Conv1d.
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
    saved = _trained_modules(model, forms) if model is not None else []
    if obstacle := _obstacle(forms, model, saved):
        raise SchemeError(f"{obstacle}: leave it dense with `where`, or merge the model and export that.")
    if not overwrite and any((folder / name).exists() for name in (WEIGHTS, CONFIG)):
        raise UsageError(f"{folder} holds an adapter: choose another folder, or pass overwrite=True.")
    tensors = {name: state[name] for name in state if name.startswith(tuple(f"{m}." for m in saved))}
    for weight, form in forms.items():
        factors = [state[f"{weight}.{factor}"].detach().cpu() for factor in form.factors]
        tensors |= {f"{_module(weight)}.{name}": tensor for name, tensor in to_peft(form, factors).items()}
    made = {
        f"{PREFIX}{name}": tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
        for name, tensor in tensors.items()
    }
    config = _config(kind_of(next(iter(forms.values())).scheme), forms, saved)
    make_folder(folder, cure="another one")
    write_tensors(folder / WEIGHTS, made, {"format": "pt"})
    with replacing(folder / CONFIG) as temporary:
        temporary.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def read_adapter(
    folder: str | os.PathLike[str], base: nn.Module | None = None
) -> tuple[State, dict[str, Form]]:
    """The factors and forms of a LoHa or LoRA adapter. Its scale alpha / r is multiplied into X1 (X for LoRA).

    The file alone cannot tell a reshaped or 1x1 kernel from a matrix, nor a Conv1d kernel from one of width [k, 1].
    With the `base` model, the forms get the shapes of its weights.
    """
    state, forms, _ = _read(Path(folder), base)
    whole = {weight: form.whole for weight, form in forms.items()}
    return _rescaled(state, forms, whole), whole


def load_adapter(folder: str | os.PathLike[str], model: M) -> M:
    """Put a LoHa or LoRA adapter on a model, in place, and return the model.

    A plain model first becomes a frozen base with adapters, as by `factorize(..., onto="frozen")`. In a model that
    has adapters already, their factors are replaced, and the base stays.
    """
    state, read, saved = _read(Path(folder), model)
    if not forms_of(model):
        alpha = Counter(map(_alpha, read.values())).most_common(1)[0][0]

        def where(name: str, module: nn.Module, parameter: str) -> Any:
            form = read.get(f"{name}.{parameter}".lstrip("."))
            return form is not None and form.scheme

        some = next(iter(read.values())).scheme
        factorize(model, some, where, force=True, onto="frozen", alpha=alpha, train=saved)
    own = forms_of(model)
    for weight, form in own.items():
        for factor, shape in form.factors.items():
            if factor.startswith("t") and weight in read and prod(shape[2:]) == 1:
                # PEFT has no core for a 1x1 kernel: X I Y^T = X Y^T.
                state.setdefault(f"{weight}.{factor}", torch.eye(form.rank).reshape(shape))
    given = {name: tuple(t.shape) for name, t in state.items() if _module(name) in {*own, *read}}
    if given != {
        f"{weight}.{factor}": s for weight, form in own.items() for factor, s in form.factors.items()
    }:
        raise UsageError(
            f"{type(model).__name__} has other adapters than {folder}: expected the same weights and ranks."
        )
    model.load_state_dict(_rescaled(state, read, own), strict=False)
    return model


def _rescaled(state: State, forms: Mapping[str, Form], wanted: Mapping[str, Form]) -> State:
    """The same change, where the forms have other scales: X1 (X for LoRA) takes the difference."""
    rescaled = dict(state)
    for weight, form in forms.items():
        if (ratio := _scale_of(form) / _scale_of(wanted[weight])) != 1:
            first = f"{weight}.{next(iter(form.factors))}"
            rescaled[first] = state[first] * ratio
    return rescaled


def _scale_of(form: Form) -> float:
    return 1.0 if form.scale is None else form.scale


def _read(folder: Path, base: nn.Module | None) -> tuple[State, dict[str, Form], list[str]]:
    """The tensors, the forms with their scales, and the names of the other modules."""
    tensors, _ = read_tensors(folder / WEIGHTS)
    shapes = None
    if base is not None:
        shapes = {name.removesuffix(f".{BASE}"): tuple(t.shape) for name, t in base.state_dict().items()}
    try:
        config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
        if config["peft_type"] not in SCHEMES:
            raise ValueError(f"peft_type is {config['peft_type']!r}, not {' or '.join(map(repr, SCHEMES))}")
        return _understand(tensors, config, shapes)
    except Exception as error:  # a foreign file may break any assumption
        raise StateError(
            f"the adapter in {folder} cannot be read ({in_a_line(error)}): expected a LoHa or LoRA adapter with "
            f"{CONFIG} and {WEIGHTS} as PEFT saved them, made for this base."
        ) from error


def _understand(
    tensors: State, config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]] | None
) -> tuple[State, dict[str, Form], list[str]]:
    """Raises on anything unusual; `_read` turns that into one error."""
    kind, saved = config["peft_type"], list(config.get("modules_to_save") or [])
    layers: defaultdict[str, State] = defaultdict(dict)
    state: State = {}
    for key, tensor in tensors.items():
        name = key.removeprefix(PREFIX)
        if any(f".{module}." in f".{name}" for module in saved):
            state[name] = tensor
            continue
        module, _, part = name.removesuffix(".weight").rpartition(".")
        layers[module][part + name[len(module) + 1 + len(part) :]] = tensor
    forms: dict[str, Form] = {}
    for module, layer in layers.items():
        weight = f"{module}.weight"
        factors, shape = from_peft(kind, module, layer, shapes[weight] if shapes else None)
        r = factors[next(iter(factors))].shape[1]
        tensor_form = len(shape) == 2 or len(factors) == 6
        scheme = SCHEMES[kind](rank=r, conv="tensor" if tensor_form else "reshape")
        forms[weight] = replace(write(scheme, shape, r), scale=_scale(kind, config, module, r))
        state |= {f"{weight}.{name}": factor.contiguous() for name, factor in factors.items()}
    check_factors(state, {weight: form.whole for weight, form in forms.items()})
    return state, forms, saved


def base_state(state: Mapping[str, Tensor], forms: Mapping[str, Form]) -> State:
    """The state of a plain base that the adapter completes: every factorized weight is 0."""
    taken = {f"{weight}.{factor}" for weight, form in forms.items() for factor in form.factors}
    rest = {name: tensor for name, tensor in state.items() if name not in taken}
    return rest | {
        weight: state[f"{weight}.{next(iter(form.factors))}"].new_zeros(form.shape)
        for weight, form in forms.items()
    }


def _trained_modules(model: nn.Module, forms: Mapping[str, Form]) -> list[str]:
    """The modules with trained parameters other than factors, for PEFT's modules_to_save. Adapters only."""
    if all(form.scale is None for form in forms.values()):
        return []
    factors = {f"{weight}.{factor}" for weight, form in forms.items() for factor in form.factors}
    named = model.state_dict(keep_vars=True).items()
    return list(dict.fromkeys(_module(n) for n, t in named if t.requires_grad and n not in factors))


def _obstacle(forms: Mapping[str, Form], model: nn.Module | None, saved: Sequence[str]) -> str:
    """Why PEFT could not use the adapter, or "". It would fail there, or silently give other outputs."""
    if len(kinds := {kind_of(form.scheme) for form in forms.values()}) > 1 and "" not in kinds:
        return (
            "some weights are written by FedPara and others by LowRank, and an adapter is either LoHa or LoRA"
        )
    for module in saved:
        if not module or any(weight.startswith(f"{module}.") for weight in forms):
            return (
                f"{module or 'the model itself'} has factors and other trained parameters, and PEFT either adapts a "
                "module or saves it whole"
            )
    for weight, form in forms.items():
        kind = kind_of(form.scheme)
        if not kind or (kind == LORA and form.is_kernel and prod(form.shape[2:]) > 1):
            return (
                f"{weight} is written by {form.scheme}, and an adapter is FedPara without nonlinearity (LoHa) or "
                'LowRank with conv="reshape" (LoRA)'
            )
        if not weight.endswith(".weight") or not 2 <= len(form.shape) <= 4:
            return f"{weight} {form.shape} is not the `weight` of a Linear, Conv1d or Conv2d inside a model"
        if model is None:
            continue
        layer, parent = (model.get_submodule(name) for name in (_module(weight), _module(_module(weight))))
        if not isinstance(layer, nn.Linear | nn.Conv1d | nn.Conv2d):
            of = type(layer).__mro__[1].__name__
            return f"{weight} belongs to a layer of type {of}, and PEFT's adapters take Linear, Conv1d and Conv2d"
        if kind == LORA and getattr(layer, "groups", 1) > 1:
            return f"{weight} belongs to a grouped convolution, which PEFT's LoRA cannot merge"
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


def _module(weight: str) -> str:
    return weight.rpartition(".")[0]


def _config(kind: str, forms: Mapping[str, Form], saved: Sequence[str]) -> dict[str, object]:
    """PEFT's config. Module names are anchored patterns: a bare `fc` would also match `head.fc`."""
    ranks = {weight: form.rank for weight, form in forms.items()}
    alphas = {weight: _alpha(form) for weight, form in forms.items()}
    r, alpha = (Counter(values.values()).most_common(1)[0][0] for values in (ranks, alphas))
    config: dict[str, object] = {
        "peft_type": kind,
        "task_type": None,
        "base_model_name_or_path": None,
        "inference_mode": True,
        "r": r,
        "alpha" if kind == LOHA else "lora_alpha": alpha,
        "rank_pattern": _pattern(ranks, r),
        "alpha_pattern": _pattern(alphas, alpha),
        "target_modules": "|".join(re.escape(_module(weight)) for weight in forms),
        "modules_to_save": list(saved) or None,
    }
    if kind == LORA:
        return config | {"lora_dropout": 0.0, "bias": "none", "init_lora_weights": True}
    return config | {
        "use_effective_conv2d": True in _styles(forms),
        "rank_dropout": 0.0,
        "module_dropout": 0.0,
        "init_weights": True,
    }


def _alpha(form: Form) -> float:
    """PEFT's scale is alpha / r."""
    alpha = form.rank * _scale_of(form)
    return int(alpha) if alpha == int(alpha) else alpha


def _pattern(values: Mapping[str, float], common: float) -> dict[str, float]:
    return {f"^{re.escape(_module(weight))}": v for weight, v in values.items() if v != common}


def _scale(kind: str, config: Mapping[str, Any], module: str, r: int) -> float:
    """alpha / r, each from the first pattern that matches the module, as PEFT looks them up."""
    rank = _looked_up(config.get("rank_pattern"), module, config["r"])
    default = config["alpha" if kind == LOHA else "lora_alpha"]
    alpha: float = _looked_up(config.get("alpha_pattern"), module, default)
    if rank != r:
        raise ValueError(f"{CONFIG} gives {module} rank {rank!r}, and its tensors have rank {r}")
    return alpha / (r**0.5 if config.get("use_rslora") else r)


def _looked_up(patterns: Any, module: str, default: Any) -> Any:
    matches = [value for key, value in (patterns or {}).items() if re.match(rf"(.*\.)?({key})$", module)]
    return matches[0] if matches else default
