"""A form as JSON values, in saved states and run folders: {"scheme", "rank", "shape", "nonlinearity", "conv"}.

An adapter also has "adapter_scale".
"""

from dataclasses import fields, replace
from operator import index
from typing import Any

from fedpara.errors import StateError
from fedpara.parameterization.schemes import SCHEMES, SIZES, Form, write


def describe_form(weight: str, form: Form) -> dict[str, object]:
    """The description of a weight's form. StateError for a scheme that a file cannot name."""
    scheme = form.scheme
    if type(scheme) is not SCHEMES.get(scheme.name):
        raise StateError(
            f"a file cannot hold {weight} with {scheme!r}, which is no scheme of the library: run without `out`, or "
            "merge the model to save its weights."
        )
    described = {"scheme": scheme.name, "rank": form.rank, "shape": list(form.shape), "nonlinearity": None}
    described |= {} if form.scale is None else {"adapter_scale": form.scale}
    return described | {f.name: getattr(scheme, f.name) for f in fields(scheme) if f.name not in SIZES}


def read_form(
    scheme: str,
    rank: int,
    shape: list[int],
    nonlinearity: str | None,
    conv: str | None = None,
    adapter_scale: float | None = None,
    **options: Any,
) -> Form:
    """The described form. Any exception means that the description is damaged."""
    has_conv = any(option.name == "conv" for option in fields(SCHEMES[scheme]))
    given = {"nonlinearity": nonlinearity} if nonlinearity is not None else {}
    options |= given | ({"conv": conv} if has_conv or conv is not None else {})
    # index() raises on anything but integers.
    form = write(SCHEMES[scheme](rank=rank, **options), tuple(map(index, shape)), index(rank))
    return replace(form, scale=None if adapter_scale is None else float(adapter_scale))
