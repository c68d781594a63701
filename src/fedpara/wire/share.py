"""What of a state is sent, what stays, and what must never be in a message (pFedPara, FedPer: Alg. 2).

Beside the model an algorithm may send extras (SCAFFOLD's control variate). They share the model's message
under `group/name`; the model is the group "" and keeps its plain names.
"""

from collections.abc import Collection, Iterable, Mapping
from itertools import accumulate

from fedpara.errors import PrivacyError, StateError
from fedpara.state import State


def split(state: State, private: Collection[str]) -> tuple[State, State]:
    """(shared, private). `combine` is the inverse."""
    unknown = sorted(set(private) - state.keys())
    if unknown:
        # A misspelt private name would be sent.
        raise StateError(f"private names not in the state: {', '.join(unknown[:5])}. Check their spelling.")
    shared = {name: tensor for name, tensor in state.items() if name not in private}
    return shared, {name: tensor for name, tensor in state.items() if name in private}


def combine(shared: State, private: State, names: Iterable[str]) -> State:
    """The whole state in the order of `names`: combine(*split(state, private), state) == state."""
    names = list(names)
    twice = shared.keys() & private.keys()
    if twice:
        raise StateError(f"both shared and private: {', '.join(sorted(twice)[:5])}. Expected one of them.")
    whole = {**shared, **private}
    odd = whole.keys() ^ set(names)
    if odd:
        raise StateError(
            f"the two parts do not make the state: {', '.join(sorted(odd)[:5])} is missing or too many."
        )
    return {name: whole[name] for name in names}


def guard(state: Mapping[str, object], private: Collection[str]) -> None:
    """PrivacyError if a private name, a group's copy of one, or a part of either is about to be sent."""
    for name in state if private else ():
        for part in (name, *name.split("/")):
            # The name itself, and whatever it lies under: `weight.x2.momentum` is of `weight.x2`.
            for whole in accumulate(part.split("."), "{}.{}".format):
                if whole in private:
                    raise PrivacyError(
                        f"{name!r} was about to be sent, and {whole!r} is private and stays with the client. "
                        "Send the shared part of split(state, private)."
                    )


def pack(groups: Mapping[str, State]) -> State:
    """One state of all groups: plain names for the group "", `group/name` for the others."""
    state: State = {}
    for group, members in groups.items():
        for name, tensor in members.items():
            if "/" in name or "/" in group:
                raise StateError(f"group {group!r}, name {name!r}: expected no '/', which parts the two.")
            state[f"{group}/{name}" if group else name] = tensor
    return state


def unpack(state: State) -> dict[str, State]:
    """The inverse of `pack`; "" is always there, any other group only if it has a tensor."""
    groups: dict[str, State] = {"": {}}
    for full, tensor in state.items():
        group, _, name = full.rpartition("/")
        groups.setdefault(group, {})[name] = tensor
    return groups
