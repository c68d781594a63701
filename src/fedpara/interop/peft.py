"""W = (w1_a w1_b) * (w2_a w2_b): FedPara's factors as the LoHa adapters of Hugging Face PEFT.

    weight                               PEFT                                 here
    Linear, 1x1 or reshaped kernel       w1_a [O, r], w1_b [r, n]             X1 [O, r], Y1 [n, r]^T
    kernel (Prop. 3)                     w1_a [r, O], w1_b [r, I], t1         X1^T, Y1^T, T1

PEFT adds the composed weight to the base's own. So an adapter written here gives back the factorized model on a
base that holds `base_state(state, forms)`, where those weights are 0, and is a delta on any other base. Biases,
norms and dense layers belong to the base: an adapter has no place for them.
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

from fedpara.errors import SchemeError, StateError, UsageError, expect_kind
from fedpara.files import make_folder, read_tensors, replacing, write_tensors
from fedpara.interop.saved import check_factors, form_of
from fedpara.parameterization import FedPara, Form, covered
from fedpara.parameterization import forms as forms_of
from fedpara.parameterization.schemes import ConvStyle
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

    FedPara without nonlinearity, on Linear, Conv2d or Conv1d. Its alpha is its rank, so that PEFT's scale is 1.
    """
    folder = Path(folder)
    if isinstance(source, nn.Module):
        state, forms = source.state_dict(), forms_of(source)
        _check_layers(source, forms)
        if over := covered(source):
            raise SchemeError(
                f"{over} has another parametrization on top of its factors, which an adapter does not hold: merge the "
                "model and export the plain weights instead."
            )
    else:
        state = dict(source)
    if not forms:
        raise UsageError(
            "there is no factorized weight to write: expected a factorized model, or a state and its forms."
        )
    check_factors(state, forms)
    _check_forms(forms)
    if not overwrite and any((folder / name).exists() for name in (WEIGHTS, CONFIG)):
        raise UsageError(f"{folder} holds an adapter: choose another folder, or allow it to be overwritten.")
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
    """The factors and forms of a LoHa adapter; its scale alpha / r goes into X1.

    A file does not tell a reshaped or 1x1 kernel from a matrix, nor the kernel of a Conv1d from one [k, 1] wide:
    given the `base` model, the forms have the shapes of its weights.
    """
    folder = Path(folder)
    if base is not None:
        expect_kind("base", base, nn.Module, UsageError)
    config = _read_config(folder)
    tensors, _ = read_tensors(folder / WEIGHTS)
    layers: defaultdict[str, State] = defaultdict(dict)
    for key, tensor in tensors.items():
        module, _, name = key.removeprefix(PREFIX).rpartition(".")
        if not key.startswith(PREFIX) or not module or name not in KERNEL:
            raise StateError(
                f"{folder / WEIGHTS} holds {key}: expected {PREFIX}<module>.hada_... only. Adapters with other "
                "modules saved beside (modules_to_save) are not LoHa alone."
            )
        layers[module][name] = tensor
    shapes = {name: tuple(tensor.shape) for name, tensor in base.state_dict().items()} if base else None
    state: State = {}
    forms: dict[str, Form] = {}
    for module, hada in layers.items():
        weight = f"{module}.weight"
        if shapes is not None and weight not in shapes:
            raise StateError(f"the base has no {weight}: expected the model that the adapter was made for.")
        factors, shape = _from_hada(module, hada, shapes[weight] if shapes else None)
        r = factors["x1"].shape[1]
        factors["x1"] = factors["x1"] * _scale(config, module, r)
        conv: ConvStyle = "tensor" if "t1" in factors or len(shape) == 2 else "reshape"
        forms[weight] = form_of(FedPara(rank=r, conv=conv), shape, r)
        state |= {f"{weight}.{name}": factors[name].contiguous() for name in forms[weight].factors}
    check_factors(state, forms)
    return state, forms


def base_state(state: Mapping[str, Tensor], forms: Mapping[str, Form]) -> State:
    """The state of the plain base on which the adapter is the whole weight: every factorized weight 0."""
    taken = {f"{weight}.{factor}" for weight, form in forms.items() for factor in form.factors}
    rest = {name: tensor for name, tensor in state.items() if name not in taken}
    return rest | {
        weight: state[f"{weight}.{next(iter(form.factors))}"].new_zeros(form.shape)
        for weight, form in forms.items()
    }


def _check_layers(model: nn.Module, forms: Mapping[str, Form]) -> None:
    for weight in forms:
        module = model.get_submodule(_module(weight))
        if not isinstance(module, nn.Linear | nn.Conv1d | nn.Conv2d):
            raise SchemeError(
                f"{weight} belongs to a layer of type {type(module).__mro__[1].__name__}: PEFT's LoHa takes Linear, "
                "Conv1d and Conv2d. Leave it dense with `where`."
            )
        parent = model.get_submodule(_module(_module(weight)))
        if isinstance(parent, nn.MultiheadAttention | nn.TransformerEncoderLayer):
            raise SchemeError(
                f"{weight} is read by the {type(parent).__name__} around it, past the layer that PEFT puts in its "
                "place: its adapter would do nothing. Leave it dense with `where`."
            )


def _check_forms(forms: Mapping[str, Form]) -> None:
    for weight, form in forms.items():
        if type(form.scheme) is not FedPara or form.scheme.nonlinearity is not None:
            raise SchemeError(
                f"{weight} is written by {form.scheme}: a LoHa adapter is W1 * W2, FedPara without nonlinearity. "
                "Merge the model and export the plain weights instead."
            )
        if not weight.endswith(".weight") or not 2 <= len(form.shape) <= 4:
            raise SchemeError(
                f"{weight} of shape {form.shape} has no LoHa adapter: PEFT takes the `weight` of a Linear, Conv1d or "
                "Conv2d inside a model. Leave it dense with `where`."
            )
    if len(_styles(forms)) > 1:
        raise SchemeError(
            'the kernels are written in both styles, conv="tensor" and conv="reshape": an adapter has one '
            "(use_effective_conv2d) for all. Factorize them alike."
        )


def _styles(forms: Mapping[str, Form]) -> set[bool]:
    """Of the kernels, is a core used. PEFT uses none for a 1x1 kernel, whatever its style here."""
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
    """x1 y1 [t1] x2 y2 [t2] and the shape of the weight, which is `shape` where that is known."""
    given = {name: tuple(tensor.shape) for name, tensor in hada.items()}
    kernel = hada.keys() == KERNEL
    widths = {"hada_w1_a": 2, "hada_w1_b": 2, "hada_t1": 4}
    if hada.keys() not in (MATRIX, KERNEL) or any(
        len(given[n]) != d for n, d in widths.items() if n in given
    ):
        raise StateError(
            f"the adapter of {module} is {given}: expected matrices hada_w1_a, hada_w1_b, hada_w2_a, hada_w2_b, "
            "and for a kernel hada_t1 and hada_t2 of four dimensions."
        )
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
        raise StateError(
            f"the adapter of {module} makes a weight of shape {own} and the base's is {shape}: expected the model "
            "that the adapter was made for."
        )
    for name in ("t1", "t2") if kernel else ():
        factors[name] = factors[name].reshape(*factors[name].shape[:2], *shape[2:])
    return factors, shape


def _module(weight: str) -> str:
    return weight.rpartition(".")[0]


def _config(forms: Mapping[str, Form]) -> dict[str, object]:
    """Module names as anchored patterns: a bare `fc` would also name `head.fc`."""
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


def _read_config(folder: Path) -> dict[str, Any]:
    if not (folder / WEIGHTS).exists() and (folder / "adapter_model.bin").exists():
        raise StateError(
            f"{folder} holds a pickle, adapter_model.bin: expected {WEIGHTS}. Save it again with PEFT."
        )
    try:
        config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise StateError(
            f"{folder / CONFIG} cannot be read ({error}): expected the folder of a PEFT adapter, with {CONFIG} and "
            f"{WEIGHTS}."
        ) from error
    kind = config.get("peft_type") if isinstance(config, dict) else None
    if kind != "LOHA":
        raise StateError(f"{folder} holds an adapter of type {kind!r}: expected 'LOHA'.")
    return dict(config)


def _scale(config: Mapping[str, Any], module: str, r: int) -> float:
    """alpha / r, each from its pattern where one matches the module, as PEFT looks them up."""
    rank = _looked_up(config.get("rank_pattern"), module, config.get("r"))
    alpha = _looked_up(config.get("alpha_pattern"), module, config.get("alpha"))
    if rank != r or not isinstance(alpha, int | float):
        raise StateError(
            f"{CONFIG} gives {module} the rank {rank!r} and alpha {alpha!r}: expected the rank of its tensors, {r}, "
            "and a number. The two files do not belong together."
        )
    return alpha / r


def _looked_up(patterns: Any, module: str, default: object) -> object:
    try:
        matches = [value for key, value in (patterns or {}).items() if re.match(rf"(.*\.)?({key})$", module)]
    except (AttributeError, re.error) as error:
        raise StateError(
            f"{CONFIG} holds the patterns {patterns!r} ({error}): expected names or patterns."
        ) from error
    return matches[0] if matches else default
