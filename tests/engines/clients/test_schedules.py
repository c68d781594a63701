"""Contract of schedules in the engines: every step is made with the rate of the golden sequence."""

import pytest
import torch

import fedpara as fp
from fedpara import algorithms
from fedpara.algorithms import Optimizer
from fedpara.engines.memory import InMemory

SCHEDULES = {
    "cosine": fp.cosine(warmup=1),
    "cosine within": fp.cosine(warmup=1, within=True),
    "linear": fp.linear(floor=0.1),
    "linear within": fp.linear(within=True),
    "constant": fp.constant(warmup=2),
    "step_decay": fp.step_decay(2, 0.5),
    "custom": lambda at, rounds: 1 / (1 + at),
}


def record():
    """An optimizer that moves nothing and sums lr and k lr in its slots, k being the step."""

    def init(y):
        zero = torch.zeros((), dtype=torch.float64)
        return {"sums": {"k": zero, "lr": zero, "k lr": zero}}

    def step(y, g, slots, lr):
        old = slots["sums"]
        k = old["k"] + 1
        return y, {"sums": {"k": k, "lr": old["lr"] + lr, "k lr": old["k lr"] + k * lr}}

    return Optimizer("record", init, step)


@pytest.mark.parametrize("name", SCHEDULES)
def test_each_step_has_its_rate(world, engine, name):
    """Clients of different lengths share lanes, and each has its own place in the round."""
    memory = InMemory()
    algorithm = algorithms.fedavg(
        lr=0.3, batch_size=4, optimizer=record(), keep_optimizer=True, schedule=SCHEDULES[name], lr_decay=0.9
    )
    run = world.simulate(world.model(), algorithm, rounds=4, cohort=6, engine=engine, memory=memory)
    local = run.session.algorithm.local
    assert local.rounds == 4
    for client, rows in enumerate(world.clients):
        steps = -(-len(rows) // 4)
        rates = [rate for t in range(1, 5) for rate in local.rates(t, steps)]
        sums = memory.get(client)["optimizer.sums"]
        assert float(sums["k"]) == 4 * steps
        assert float(sums["lr"]) == pytest.approx(sum(rates), rel=1e-6)
        assert float(sums["k lr"]) == pytest.approx(
            sum(k * rate for k, rate in enumerate(rates, 1)), rel=1e-6
        )


def test_scaffold_divides_by_the_mean_rate(world, engine):
    """K eta is the sum of the rates. Small steps on all examples: c_i is then the gradient at x, at any rates."""
    controls = []
    for schedule in (fp.linear(within=True), None):
        fields = {"lr": 1e-3, "batch_size": 16, "steps": 4, "schedule": schedule}
        memory = InMemory()
        algorithm = world.algorithm("scaffold", **fields)
        run = world.simulate(world.model(), algorithm, rounds=1, cohort=6, engine=engine, memory=memory)
        controls.append(memory)
        factor = 1.0 if schedule is None else (1 + 0.75 + 0.5 + 0.25) / 4
        assert run.session.algorithm.local.mean_lr(1, 4) == pytest.approx(1e-3 * factor)
    for client in range(6):
        falling, steady = (memory.get(client)["control"] for memory in controls)
        for name, control in steady.items():
            assert (falling[name] - control).norm() < 0.02 * control.norm()


def test_the_personal_model_follows_the_schedule(world, engine):
    memory = InMemory()
    algorithm = algorithms.ditto(
        0.1, 0.03, 5, lr=0.3, optimizer=record(), keep_optimizer=True, schedule=fp.linear(within=True)
    )
    world.simulate(world.model(), algorithm, rounds=4, cohort=6, engine=engine, memory=memory)
    sums = memory.get(0)["personal.optimizer.sums"]
    assert float(sums["k"]) == 20
    assert float(sums["lr"]) == pytest.approx(0.03 * sum(1 - k / 20 for k in range(20)), rel=1e-6)
