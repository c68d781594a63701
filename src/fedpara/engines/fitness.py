"""Whether an experiment can run batched, and why not. A step of one example tells what vmap thinks of the model."""

from copy import deepcopy

import numpy as np
import torch
from torch import nn
from torch.func import vmap

from fedpara import parameterization
from fedpara.algorithms import Local
from fedpara.data import FederatedData, normalise
from fedpara.engines.client import Protocol
from fedpara.engines.places import stack
from fedpara.engines.stacked import LANES_OF_A_STEP, one_step
from fedpara.state import zeros_like


def unfit(protocol: Protocol, data: FederatedData) -> str:
    """Why this experiment cannot run batched, or ""."""
    program, local = protocol.program, protocol.algorithm.local
    forms = parameterization.forms(program.model)
    if local.jacobian and program.buffers:
        return "the Jacobian correction has no batched form for a model with buffers"
    if local.jacobian and not forms:
        return "the Jacobian correction needs factorized weights"
    if _normalises_by_batch(program.model) and _uneven(data, local):
        return "BatchNorm would see the padding of short batches"
    plain = parameterization.merge(program.model) if forms else deepcopy(program.model)
    step = one_step(plain.train(), forms, protocol.algorithm, "float32", program.shared, True)
    first = np.array(data.clients[next(i for i in range(len(data)) if data.size(i))])[:1]
    images = normalise(data.train.inputs[first], data.train.mean, data.train.std)
    images = torch.cat([images, images])
    labels = data.train.labels[first].repeat(2)
    x = program.start(program.shared)
    own = protocol.algorithm.client_init(x)
    down = protocol.algorithm.broadcast(protocol.algorithm.server_init(x))
    parameters = program.start(program.parameters)
    velocity = zeros_like(parameters) if local.momentum else {}
    states = [parameters, velocity, program.start(program.buffers)]
    lanes = [stack([state]) if state else {} for state in states]
    stacked_own = {group: stack([state]) for group, state in own.items()}
    try:
        with torch.random.fork_rng(devices=[]):
            vmap(step, in_dims=LANES_OF_A_STEP, randomness="different")(
                *lanes,
                stacked_own,
                images[None],
                labels[None],
                torch.tensor([2]),
                torch.tensor([0]),
                x,
                down,
                torch.tensor(0.1),
            )
    except Exception as error:
        return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
    return ""


def slower_on_cpu(protocol: Protocol, cohort: int) -> str:
    """Why sequential is the faster one on a CPU, or "". A rule, not a timing: the same run takes the same path.

    Measured in benchmarks/README.md: stacked matrix products win 5 to 60%, grouped convolutions lose a third.
    """
    if any(isinstance(module, nn.modules.conv._ConvNd) for module in protocol.program.model.modules()):
        return "stacked convolutions are slower on a CPU"
    return "a cohort of one has nothing to stack" if cohort == 1 else ""


def _normalises_by_batch(model: nn.Module) -> bool:
    return any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules())


def _uneven(data: FederatedData, local: Local) -> bool:
    return any(data.size(i) % local.batch_size for i in range(min(len(data), 1000)))
