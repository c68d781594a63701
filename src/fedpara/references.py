"""References: your functions by name, in configs and on the command line.

    package.module:function                        the function
    package.module:function(width=32, name="a")    the function with keywords, which are Python literals
    cosine(warmup=5), step_decay(30)               a factory of the library with arguments (`library_call`)

The module may be in the working directory. `parse` and `library_call` only read the text: the other functions import
the module.
"""

import ast
import importlib
import inspect
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from fedpara.errors import ConfigError, FedParaError, among, in_a_line

REFERENCE_HINT = "Your own is package.module:function."
EXPECTED = "expected package.module:function or package.module:function(width=32), with Python literals"
OBJECT = "python:"
"""How a config names an object that `simulate` was given, such as python:UNet. It cannot be built from its name."""
BUILT_IN = ("generated:", "hub:", "load:", "hybrid:", OBJECT)
"""How the library's own names with a colon begin, such as the data set generated:mnist."""


@dataclass(frozen=True)
class Reference:
    """`keywords` is None for a function without parentheses."""

    text: str
    module: str
    function: str
    keywords: dict[str, Any] | None


def is_reference(text: str) -> bool:
    """Whether the text names a function of the user and not something of the library."""
    return ":" in text and not text.startswith(BUILT_IN)


def parse(text: str) -> Reference:
    """The parts of a reference. Nothing is imported and nothing is evaluated."""
    module, _, rest = text.partition(":")
    try:
        match ast.parse(rest.strip(), mode="eval").body:
            case ast.Name(id=function):
                keywords = None
            case ast.Call(func=ast.Name(id=function), args=[], keywords=given):
                keywords = {str(part.arg): ast.literal_eval(part.value) for part in given if part.arg}
                if len(keywords) < len(given):  # **options
                    raise ValueError
            case _:
                raise ValueError
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        raise ConfigError(f"{text!r}: {EXPECTED}.") from None
    if not re.fullmatch(r"[^\W\d]\w*(\.[^\W\d]\w*)*", module):
        raise ConfigError(f"{text!r}: {EXPECTED}.")
    return Reference(text, module, function, keywords)


def library_call(
    text: str, known: Mapping[str, Callable[..., Any]], what: str, hint: str = REFERENCE_HINT
) -> tuple[str, dict[str, Any]]:
    """(name, arguments by name) of a factory of the library, such as step_decay(30) or cosine. Nothing is called."""
    name, bracket, rest = text.partition("(")
    name = name.strip()
    if name not in known:
        raise ConfigError(f"unknown {what} {text!r}: {among(name, known)} {hint}".rstrip())
    try:
        body = ast.parse(f"call({rest}" if bracket else "call()", mode="eval").body
        if not isinstance(body, ast.Call) or not isinstance(body.func, ast.Name):
            raise ValueError("expected literals in one pair of parentheses")
        arguments = [ast.literal_eval(part) for part in body.args]
        keywords = {str(part.arg): ast.literal_eval(part.value) for part in body.keywords}
        return name, inspect.signature(known[name]).bind(*arguments, **keywords).arguments
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError) as error:
        signature = ", ".join(map(str, inspect.signature(known[name]).parameters.values()))
        reason = str(error).partition(" (<unknown>")[0]
        if reason.startswith("malformed node"):
            reason = "an argument is no literal, such as 0.5, True or 'text'"
        raise ConfigError(
            f"{what} is {text!r} ({reason}): expected {name}({signature}), with Python literals."
        ) from None


def split(text: str) -> list[str]:
    """The parts between commas. A comma inside brackets or quotes does not separate."""
    parts, depth, quote = [""], 0, ""
    for char in text:
        if quote:
            quote = "" if char == quote else quote
        elif char in "'\"":
            quote = char
        depth += (not quote) * ((char in "([{") - (char in ")]}"))
        if char == "," and not depth and not quote:
            parts.append("")
        else:
            parts[-1] += char
    return [part.strip() for part in parts]


def value(text: str) -> Any:
    """What the reference stands for: the function itself or, with parentheses, what the call returns."""
    return find(text) if parse(text).keywords is None else call(text)


def call(text: str, *arguments: Any, offered: Mapping[str, Any] | None = None, **keywords: Any) -> Any:
    """The result of the function.

    It gets the arguments, the reference's keywords and `keywords`, which replace them. A value in `offered` is passed
    only if the function's signature names it and the reference does not give it.
    """
    reference = parse(text)
    function, named = find(text), parameters(text)
    given = {**(reference.keywords or {}), **keywords}
    given = {name: v for name, v in (offered or {}).items() if name in named} | given
    try:
        inspect.Signature(list(named.values())).bind(*arguments, **given)
    except TypeError as error:
        signature = ", ".join(map(str, named.values()))
        raise ConfigError(
            f"{text!r} cannot be called ({error}): the function is {reference.function}({signature})."
        ) from None
    try:
        return function(*arguments, **given)
    except FedParaError:
        raise
    except Exception as error:
        raise ConfigError(f"{text!r} failed: {in_a_line(error)}.") from error


def parameters(text: str) -> dict[str, inspect.Parameter]:
    """The parameters of the function, by name."""
    function = find(text)
    if not callable(function):
        raise ConfigError(f"{text!r} is {type(function).__name__}: expected a function.")
    try:
        return dict(inspect.signature(function).parameters)
    except ValueError:  # a builtin without a signature
        kinds = {"arguments": inspect.Parameter.VAR_POSITIONAL, "keywords": inspect.Parameter.VAR_KEYWORD}
        return {name: inspect.Parameter(name, kind) for name, kind in kinds.items()}


def wrong_result(text: str, result: object, expected: str) -> ConfigError:
    """The error for a function that returned something else."""
    return ConfigError(f"{text!r} returned {type(result).__name__}: expected {expected}.")


def search_working_directory_last() -> None:
    """Look for modules in the working directory after all other places, not before them."""
    here = str(Path.cwd())
    sys.path[:] = [*(place for place in sys.path if place != here), here]


def find(text: str) -> Any:
    """The function, imported and not called."""
    reference = parse(text)
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        module = importlib.import_module(reference.module)
    except Exception as error:  # the user's module may raise anything
        raise ConfigError(
            f"{reference.text!r} cannot be imported ({in_a_line(error)}): looked in {here}, on PYTHONPATH and in the "
            "installed packages. Run from the module's folder, or install its package."
        ) from error
    if hasattr(module, reference.function):
        return getattr(module, reference.function)
    functions = [name for name, held in vars(module).items() if callable(held)]
    near = get_close_matches(reference.function, functions, n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    raise ConfigError(f"module {reference.module!r} has no function {reference.function!r}.{hint}")
