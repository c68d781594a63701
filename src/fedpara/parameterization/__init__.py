"""Weights as factors: schemes, `factorize`, `merge`, starting factors and fitting."""

from fedpara.parameterization.convert import (
    as_they_are,
    compose_state,
    composed_once,
    covered,
    factorize,
    fit_errors,
    forms,
    inits,
    is_adapter,
    load,
    merge,
    private,
    refuse_old_norms,
)
from fedpara.parameterization.fedmud.aware import AwareKronecker, AwareLowRank
from fedpara.parameterization.fedmud.kronecker import Kronecker
from fedpara.parameterization.fit import fit
from fedpara.parameterization.initialise import calibrated, fan_out, he
from fedpara.parameterization.jacobian import corrected_backward, corrected_grad
from fedpara.parameterization.schemes import (
    SCHEMES,
    FedPara,
    Form,
    LowRank,
    PFedPara,
    Scheme,
    make_scheme,
    write,
)
from fedpara.parameterization.selection import Choice, plan

__all__ = [
    "SCHEMES",
    "AwareKronecker",
    "AwareLowRank",
    "Choice",
    "FedPara",
    "Form",
    "Kronecker",
    "LowRank",
    "PFedPara",
    "Scheme",
    "as_they_are",
    "calibrated",
    "compose_state",
    "composed_once",
    "corrected_backward",
    "corrected_grad",
    "covered",
    "factorize",
    "fan_out",
    "fit",
    "fit_errors",
    "forms",
    "he",
    "inits",
    "is_adapter",
    "load",
    "make_scheme",
    "merge",
    "plan",
    "private",
    "refuse_old_norms",
    "write",
]
