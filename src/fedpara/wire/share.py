"""The shared and the private part of a state (pFedPara, FedPer: Alg. 2), and the contents of a message.

An algorithm may send variables with the model, such as SCAFFOLD's control variate. In the message their tensors are
called `variable/name`; the model is the variable "" and keeps its plain names.
"""

from collections.abc import Collection, Iterable, Mapping
from itertools import accumulate

from fedpara.errors import PrivacyError, StateError
from fedpara.state import State


def split(state: State, private: Collection[str]) -> tuple[State, State]:
    """(shared, private). `combine` is the inverse."""
    unknown = sorted(set(private) - state.keys())
    if unknown:
        # Otherwise the tensor behind a misspelt private name would be sent.
        raise StateError(f"private names not in the state: {', '.join(unknown[:5])}. Check their spelling.")
    shared = {name: tensor for name, tensor in state.items() if name not in private}
    return shared, {name: tensor for name, tensor in state.items() if name in private}


def combine(shared: State, private: State, names: Iterable[str]) -> State:
    """The whole state in the order of `names`: combine(*split(state, private), state) == state."""
    names = list(names)
    twice = shared.keys() & private.keys()
    if twice:
        raise StateError(f"both shared and private: {', '.join(sorted(twice)[:5])}. Expected one of the two.")
    whole = {**shared, **private}
    odd = whole.keys() ^ set(names)
    if odd:
        raise StateError(
            f"the two parts do not make up the state: {', '.join(sorted(odd)[:5])} is missing or unexpected."
        )
    return {name: whole[name] for name in names}


def guard(state: Mapping[str, object], private: Collection[str]) -> None:
    """Raise PrivacyError if a private tensor, a variable for one, or a part of either is about to be sent."""
    for name in state if private else ():
        for part in (name, *name.split("/")):
            # The name and its prefixes: `weight.x2.momentum` is a part of `weight.x2`.
            for whole in accumulate(part.split("."), "{}.{}".format):
                if whole in private:
                    raise PrivacyError(
                        f"{name!r} was about to be sent, and {whole!r} is private and stays with the client. "
                        "Send the shared part of split(state, private)."
                    )


def pack(variables: Mapping[str, State]) -> State:
    """One state of all variables: plain names for the variable "", `variable/name` for the others."""
    packed: State = {}
    for variable, state in variables.items():
        for name, tensor in state.items():
            if "/" in name or "/" in variable:
                raise StateError(f"variable {variable!r}, name {name!r}: '/' is the separator. Rename it.")
            packed[f"{variable}/{name}" if variable else name] = tensor
    return packed


def unpack(state: State) -> dict[str, State]:
    """The inverse of `pack`. The variable "" is always present, any other only if it has a tensor."""
    variables: dict[str, State] = {"": {}}
    for full, tensor in state.items():
        variable, _, name = full.rpartition("/")
        variables.setdefault(variable, {})[name] = tensor
    return variables
