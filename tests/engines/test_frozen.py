"""Frozen tensors: neither trained nor sent, shared by all lanes, and compared by their digest."""

from types import MappingProxyType

import pytest
import torch
from torch import nn

import fedpara as fp
from fedpara.engines.flower.engine import digest
from fedpara.engines.flower.policy import Policy
from fedpara.engines.flower.roster import Roster
from fedpara.engines.flower.rpc import Hello, Request, to_packet
from fedpara.engines.memory import InMemory
from fedpara.engines.program import make_program
from fedpara.engines.progress import Schedule
from fedpara.engines.server.rounds import run_rounds
from fedpara.errors import ConfigError
from fedpara.wire import decode

SCHEMES = {
    "fedpara": fp.FedPara(rank=3),
    "pfedpara": fp.PFedPara(rank=3),
    "lowrank": fp.LowRank(rank=3),
}


class Tiny(nn.Module):
    """A transformer on the rows of an image, with a table of positions."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(8, 16)
        self.norm = nn.LayerNorm(16)
        self.qkv = nn.Linear(16, 48)
        self.head = nn.Linear(16, 10)
        self.register_buffer("positions", torch.linspace(0, 1, 8)[:, None])

    def forward(self, x):
        x = self.norm(self.embed(x.flatten(1, -2)) + self.positions)
        q, k, v = self.qkv(x).chunk(3, -1)  # by hand: torch's fused attention has no batching rule on a CPU
        return self.head((x + (q @ k.mT / 4).softmax(-1) @ v).mean(1))


def adapted(scheme="fedpara", seed=0, **options):
    torch.manual_seed(seed)
    model = Tiny()
    torch.manual_seed(1)
    return fp.factorize(model, SCHEMES[scheme], onto="frozen", train=("head",), **options)


@pytest.mark.parametrize("jacobian", [0.0, 0.5])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_both_engines_train_the_same_adapters(world, scheme, jacobian):
    algorithm = world.algorithm(jacobian=jacobian)
    federation = world.personal if scheme == "pfedpara" else None
    one, other = (
        world.simulate(adapted(scheme), algorithm, engine=engine, rounds=3, cohort=6, federation=federation)
        for engine in ("sequential", "batched")
    )
    assert other.engine.startswith("batched")
    for client in range(2):
        state = other.client_state(client)
        for name, tensor in one.client_state(client).items():
            torch.testing.assert_close(tensor, state[name], rtol=1e-4, atol=1e-6)
    model = adapted(scheme)
    moved = {n for n, t in one.client_state(0).items() if not torch.equal(t, model.state_dict()[n])}
    assert moved == set(one.session.program.parameters)
    merged = fp.merge(model, one.client_state(0))
    plain = Tiny()
    plain.load_state_dict(merged.state_dict())


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_message_holds_only_what_trains_and_is_shared(world, engine, scheme):
    session = world.session(adapted(scheme))
    seen = world.engine(engine, session, InMemory())
    next(iter(run_rounds(session, seen, Schedule(1, 3, 3, world.federation.size), personal=False)))
    kept = ("x2", "y2") if scheme == "pfedpara" else ()
    factors = {
        name
        for name in adapted(scheme).state_dict()
        if name.startswith(("embed.weight.", "qkv.weight.")) and not name.endswith(("base", *kept))
    }
    for message in (seen.down[0], *(reply.message for reply in seen.up[0])):
        _, state = decode(message)
        assert set(state) == factors | {"head.weight", "head.bias"}
        assert len(message) < 4 * sum(tensor.numel() for tensor in state.values()) + 2000


def test_the_digest_sees_every_frozen_number_and_scale():
    same = make_program(adapted()).base
    assert same
    assert same == make_program(adapted()).base
    others = [adapted(seed=2), adapted(alpha=6), adapted()]
    others[2].positions[3] += 1e-6
    assert len({same, *(make_program(model).base for model in others)}) == 4
    trained = adapted()
    with torch.no_grad():
        trained.head.bias += 1
    assert make_program(trained).base == same
    assert make_program(nn.Linear(3, 3)).base == ""


def test_a_node_with_another_base_is_refused_by_name(world):
    ours, theirs, plain = (
        digest(world.session(model)) for model in (adapted(), adapted(seed=2), adapted("lowrank"))
    )
    request = Request("hello", "", "1", "run", 1.0)

    class One:
        def nodes(self):
            return MappingProxyType({7: b""})

        def send(self, packets, seconds):
            return ["a"]

        def collect(self, ids):
            return {"a": to_packet(Hello("1", scheme="fedpara-adapter", digest=self.digest))}

    reasons = {}
    for name, given in {"same": ours, "base": theirs, "shapes": plain}.items():
        transport = One()
        transport.digest = given
        roster = Roster(
            transport,
            Policy(wait=0.0),
            request,
            scheme="fedpara-adapter",
            sources="",
            digest=ours,
            clients=1,
            keys=None,
            counts=None,
            clock=lambda: 0.0,
            sleep=lambda seconds: None,
        )
        roster.find([0], 1)
        reasons[name] = roster.refusals()
    assert reasons["same"] == ""
    assert "its base (the frozen weights) differs from the server's" in reasons["base"]
    assert "other names, shapes or types" in reasons["shapes"]


class Buffers(nn.Module):
    """One buffer per way to write to it, and those that are only read."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(64, 10)
        self.norm = nn.BatchNorm1d(10)
        for name in ("assigned", "added", "entry", "in_place", "out", "alias", "by_name", "by_helper"):
            self.register_buffer(name, torch.zeros(1))
        self.register_buffer("mask", torch.ones(64))
        self.register_buffer("ids", torch.arange(64)[None])
        self.register_buffer("table", torch.ones(1, 64))

    def forward(self, x):
        x = x.flatten(1).masked_fill(self.mask == 0, 0.0) * self.table[:, : x.shape[-1] ** 2]
        x = x.gather(1, self.ids.expand(len(x), -1))
        with torch.no_grad():
            self.assigned = self.assigned + 1
            self.added += 1
            self.entry[0] = 1
            self.in_place.add_(1)
            torch.add(self.assigned, 1, out=self.out)
            alias = self.alias
            alias += 1
            getattr(self, "by_name").add_(1)  # noqa: B009
        return self.norm(self.fc(x))


class Computed(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("first", torch.zeros(1))

    def forward(self, x):
        for name in ("first",):
            getattr(self, name).add_(1)
        return x


def test_a_buffer_travels_if_the_code_may_write_it():
    program = make_program(Buffers())
    norm = {f"norm.{name}" for name in ("running_mean", "running_var", "num_batches_tracked")}
    written = {"assigned", "added", "entry", "in_place", "out", "alias", "by_name"}
    assert set(program.buffers) == norm | written
    assert set(program.frozen) == {"mask", "ids", "table", "by_helper"}
    assert make_program(nn.Sequential(nn.Linear(2, 2), Computed())).buffers == ("1.first",)
    unseen = type("Unseen", (Computed,), {})  # no source
    assert make_program(nn.Sequential(nn.Linear(2, 2), unseen())).buffers == ("1.first",)


def test_a_write_that_the_code_hides_stops_the_run(world):
    """The change would be lost. A hook is outside the module's code."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    model.register_buffer("count", torch.zeros(()))
    model.register_forward_hook(lambda module, *_: module.count.add_(1) and None)
    with pytest.raises(ConfigError, match=r"a step changes count, which .* \(self\.count = \.\.\.\)"):
        world.simulate(model)
