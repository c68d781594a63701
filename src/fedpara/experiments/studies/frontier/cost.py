"""What a combination sends, without training: the lengths of encoded messages and the cohorts of seed 1.

The messages hold random numbers, because their lengths depend only on the shapes. The layers that recycling leaves out
depend on the training; here all are equally likely. On a grid the lengths depend on the training, so they are None.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from statistics import mean
from typing import Any

import torch

from fedpara import models
from fedpara.algorithms import Variables
from fedpara.engines.differences import Differences, Known
from fedpara.engines.participation.cohorts import Cohorts
from fedpara.engines.program import Program, make_program
from fedpara.engines.session import Session
from fedpara.engines.settings import read_gammas
from fedpara.engines.setup.private_run import open_session
from fedpara.engines.setup.recycling import DRAWN, RECYCLING
from fedpara.experiments.build import build_algorithm, build_model, build_scheme
from fedpara.experiments.config import Experiment
from fedpara.experiments.studies.frontier.combinations import Scale
from fedpara.wire import Link, Message, Spec, make_message


def costs(scale: Scale, rounds: int | None = None) -> dict[str, dict[str, float | None]]:
    """By combination: parameters, mean bytes up and down per client and round, and bytes of all rounds."""
    shape = models.usual_shape(scale.base.model)
    found: dict[str, dict[str, float | None]] = {}
    for name in scale.combinations:
        experiment = scale.experiment(name)
        up, down, parameters = _of_all_gammas(scale, experiment, shape, rounds or experiment.rounds)
        total = None if down is None else (up + down) * experiment.cohort * (rounds or experiment.rounds)
        found[name] = {"parameters": parameters, "up": up, "down": down, "bytes": total}
    return found


def _of_all_gammas(
    scale: Scale, e: Experiment, shape: tuple[int, ...], rounds: int
) -> tuple[float, float | None, int]:
    """`_sent`; with a gamma per client, the mean over the clients of all rounds, and the largest size."""
    if e.gammas is None:
        return _sent(_program(scale, e, shape), e, rounds)
    gammas = read_gammas(e.gammas) or ()
    each = [replace(e, gammas=None, gamma=gamma) for gamma in gammas]
    found = [_sent(_program(scale, one, shape), one, rounds) for one in each]
    cohorts = Cohorts(1, e.clients, e.cohort)
    clients = [client % len(gammas) for t in range(1, rounds + 1) for client in cohorts.draw(t)]
    down = None if found[0][1] is None else mean(found[level][1] or 0.0 for level in clients)
    return mean(found[level][0] for level in clients), down, max(parameters for *_, parameters in found)


def _sent(program: Program, e: Experiment, rounds: int) -> tuple[float, float | None, int]:
    """(mean bytes up per client and round, the same down, shared parameters)"""
    link = Link(e.link_up, e.link_down)
    session = open_session(program, build_algorithm(e), link, seed=1, rotate=e.rotate, recycle=e.recycle)

    @cache
    def up(sent: frozenset[str]) -> int:
        return len(_message(session, {name: session.up[name] for name in sent}, session.link.up))

    ups = [up(frozenset(session.up_in(t, _left_out(session, t)))) for t in range(1, rounds + 1)]
    return mean(ups), _down(session, e, rounds), _shared(program)


def parameters(scale: Scale, combination: str) -> int:
    """The number of the model's values that a combination trains and sends."""
    model = scale.base.model
    shape = models.usual_shape(model) if model in models.names() else None
    return _shared(_program(scale, scale.experiment(combination), shape))


def _program(scale: Scale, e: Experiment, shape: tuple[int, ...] | None) -> Program:
    return make_program(build_model(e, scale.classes, shape, build_scheme(e)))


def _shared(program: Program) -> int:
    return sum(program.initial[name].numel() for name in program.shared)


def _left_out(session: Session, round: int) -> Variables:
    """The variables of a server that leaves out random layers from the second round on."""
    if session.recycling is None or round == 1:
        return {}
    layers = torch.randperm(len(session.recycling.layers), generator=torch.Generator().manual_seed(round))
    return {RECYCLING: {DRAWN: (layers < session.recycling.count).to(torch.uint8)}}


def _down(session: Session, e: Experiment, rounds: int) -> float | None:
    if session.link.downlink.grid is not None:
        return None
    message = _message(session, session.down, session.link.down)
    if not session.differences:
        return len(message)
    copy, cohorts = _message(session, session.down, "float32"), Cohorts(1, e.clients, e.cohort)
    last: dict[int, int] = {}
    sent = []
    for t in range(1, rounds + 1):
        known = Known({}, (len(message),) * (t - 1), last)
        sending = Differences(message.head, message.tensors, {}, known, copy)
        cohort = cohorts.draw(t)
        sent += [sending.bytes_to(client) for client in cohort]
        last = {**last, **dict.fromkeys(cohort, t)}
    return mean(sent)


def _message(session: Session, spec: Spec | Mapping[str, Any], link: str) -> Message:
    generator = torch.Generator().manual_seed(0)
    state = {name: torch.randn(shape, generator=generator).to(dtype) for name, (dtype, shape) in spec.items()}
    return make_message(state, session.header(1), link, generator, session.exact)
