"""Attacks by hostile clients, as values: for tests of defences and for papers. Simulation only."""

from collections.abc import Callable

from fedpara.attacks.colluding import alie, ipm
from fedpara.attacks.core import Attack
from fedpara.attacks.federation import hostile_clients, poisoned
from fedpara.attacks.poisoning import backdoor, label_flip
from fedpara.attacks.sending import gauge, noise, scaling, sign_flip

ATTACKS: dict[str, Callable[..., Attack]] = {
    "sign-flip": sign_flip,
    "scaling": scaling,
    "noise": noise,
    "label-flip": label_flip,
    "backdoor": backdoor,
    "alie": alie,
    "ipm": ipm,
    "gauge": gauge,
}
"""By the name that a config gives them, with arguments: "backdoor(target=3)"."""

__all__ = [
    "ATTACKS",
    "Attack",
    "alie",
    "backdoor",
    "gauge",
    "hostile_clients",
    "ipm",
    "label_flip",
    "noise",
    "poisoned",
    "scaling",
    "sign_flip",
]
