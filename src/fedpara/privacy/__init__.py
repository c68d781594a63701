"""Differential privacy: mechanisms, accountants and the privacy cost of a run. `docs/guides/privacy.md` explains it."""

from fedpara.privacy.accountant import epsilon, epsilon_rdp, noise_for, rounds_within
from fedpara.privacy.kinds import KINDS, Example, Privacy, User, read_privacy
from fedpara.privacy.spending import Spending

__all__ = [
    "KINDS",
    "Example",
    "Privacy",
    "Spending",
    "User",
    "epsilon",
    "epsilon_rdp",
    "noise_for",
    "read_privacy",
    "rounds_within",
]
