"""Golden: the residue of error feedback, by hand over three rounds, and where it is kept."""

import numpy as np
import pytest
import torch

import fedpara as fp
from fedpara.engines.client import reply_of
from fedpara.engines.local.trained_row import Start
from fedpara.engines.local.worker import Trained
from fedpara.engines.memory import InMemory
from fedpara.engines.progress import Schedule
from fedpara.engines.server.rounds import run_rounds
from fedpara.engines.session import RESIDUE
from fedpara.wire import decode, make_message


def rounded(x):
    return torch.from_numpy(x).to(torch.bfloat16).double().numpy()


def largest_tenth(a):
    """The k largest numbers of a matrix, in bfloat16, in NumPy."""
    flat = a.astype(np.float64).ravel()
    kept = np.argsort(-np.abs(flat), kind="stable")[: round(0.1 * flat.size)]
    sent = np.zeros_like(flat)
    sent[kept] = rounded(flat[kept])
    return sent.reshape(a.shape)


def test_three_rounds_of_topk_by_hand(world):
    """a = d + e;  sent = top-k(a);  e = a - sent"""
    session = world.session(world.model(), link=fp.Link(up="topk(0.1, feedback=True)"))
    model = {name: session.program.initial[name] for name in session.program.shared}
    memory = session.first_memory(model)
    generator = torch.Generator().manual_seed(0)
    e = {"fc1.weight": np.zeros((32, 64)), "fc2.weight": np.zeros((10, 32))}
    assert memory[RESIDUE].keys() == e.keys()
    for t in (1, 2, 3):
        y = {name: x + torch.randn(x.shape, generator=generator) for name, x in model.items()}
        trained = Trained(y, {}, 0.0, 1)
        reply, memory = reply_of(Start(session, model, {}), [trained], memory, round=t, client=0, examples=1)
        _, sent = decode(reply.message, session.exact, session.link.up, session.up)
        for name in e:
            a = (y[name] - model[name]).double().numpy() + e[name]
            expected = largest_tenth(a)
            np.testing.assert_allclose(sent[name].numpy(), expected, rtol=0, atol=1e-6)
            e[name] = a - expected
            np.testing.assert_allclose(memory[RESIDUE][name].numpy(), e[name], rtol=0, atol=1e-5)
        assert torch.equal(sent["fc1.bias"], y["fc1.bias"] - model["fc1.bias"])


UPLINKS = ("sign(feedback=True)", "int8(feedback=True)", "float16(feedback=True)", "powersgd(feedback=True)")


@pytest.mark.parametrize("up", UPLINKS)
def test_what_arrives_and_the_residue_add_up_to_every_change(world, engine, up):
    """sum of the messages + e = sum of the changes: nothing is lost, whatever the link."""
    link = fp.Link(up=up)
    session, memory = world.session(world.model(), world.algorithm("scaffold"), link), InMemory()
    seen = world.engine(engine, session, memory)
    exact = world.session(world.model(), world.algorithm("scaffold"))
    alone = world.engine(engine, exact, InMemory())
    arrived, changes = {}, {}
    for result in run_rounds(session, seen, Schedule(3, 6, 6, world.federation.size), personal=False):
        assert not result.refused
        t = result.number
        _, x = decode(seen.down[t - 1])
        message = next(reply.message for reply in seen.up[t - 1] if reply.client == 0)
        _, sent = decode(message, session.exact, link.up, session.up)
        # The same training over an exact link gives the change that the client made.
        (reply,) = alone.train(t, [0], make_message(x, exact.header(t)), False)
        alone.commit(t, [0])
        _, y = decode(reply.message)
        for name in memory.get(0)[RESIDUE]:
            change = y[name] if "/" in name else y[name] - x[name]
            changes[name] = changes.get(name, 0) + change
            arrived[name] = arrived.get(name, 0) + sent[name]
    for name, left in memory.get(0)[RESIDUE].items():
        torch.testing.assert_close(arrived[name] + left, changes[name], rtol=0, atol=2e-5)
        assert float(left.abs().max()) > 0


def test_a_refused_update_leaves_the_residue_as_it_was(world, engine):
    link = fp.Link(up="topk(0.1, feedback=True)")
    run = world.simulate(world.model(), link=link, rounds=1, cohort=6, max_norm=1e-9, engine=engine)
    assert len(run.rounds[0].refused) == 6
    assert all(run.memory.get(client) is None for client in range(6))


def test_the_residue_is_no_variable_of_the_algorithm(world, engine):
    """Ditto and SCAFFOLD with feedback send and keep what they do without it, beside the residue."""
    for algorithm in ("scaffold", "ditto"):
        memories = []
        for up in ("int4", "int4(feedback=True)"):
            run = world.simulate(
                world.model("pfedpara"), world.algorithm(algorithm), link=fp.Link(up=up), engine=engine
            )
            memories.append(run.memory.get(run.rounds[-1].cohort[0]))
        assert memories[1].keys() - memories[0].keys() == {RESIDUE}


def test_feedback_brings_a_biased_link_to_the_exact_mean(world):
    """Clients that always make the same change: with feedback the server moves by its mean, without it does not."""
    moved = {}
    for up in ("float32", "topk(0.1)", "topk(0.1, feedback=True)"):
        session = world.session(world.model(), link=fp.Link(up=up))
        model = {name: session.program.initial[name] for name in session.program.shared}
        change = torch.randn(32, 64, generator=torch.Generator().manual_seed(1))
        memory, total = session.first_memory(model), torch.zeros(32, 64)
        for t in range(1, 61):
            y = {**model, "fc1.weight": model["fc1.weight"] + change}
            start, trained = Start(session, model, {}), Trained(y, {}, 0.0, 1)
            reply, memory = reply_of(start, [trained], memory, round=t, client=0, examples=1)
            _, sent = decode(reply.message, session.exact, session.link.up, session.up)
            total += sent["fc1.weight"] - (model["fc1.weight"] if up == "float32" else 0)
        moved[up] = float((total / 60 - change).norm() / change.norm())
    assert moved["float32"] < 1e-5
    assert moved["topk(0.1)"] > 0.7
    assert moved["topk(0.1, feedback=True)"] < 0.25
