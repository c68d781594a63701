"""The protocol of secure aggregation without a transport: a cohort and its server in this process."""

import numpy as np

from fedpara.errors import WireError
from fedpara.privacy.randomness import Noise, seeded_key
from fedpara.secure import SecAgg
from fedpara.secure.client import Participant
from fedpara.secure.distributed_noise import ClientNoise
from fedpara.secure.messages import STAGES
from fedpara.secure.server import Aggregation

LENGTH = 200


class Federation:
    """A cohort in this process. `vanish` maps a stage to the clients that do not answer it any more.

    `noise` is the standard deviation of the noise in the smallest sum. Its key is seeded.
    """

    def __init__(self, how=None, clients=5, vanish=None, scale=0.05, length=LENGTH, noise=0.0):
        self.how, self.clients = how or SecAgg(), list(range(10, 10 + clients))
        rng = np.random.default_rng(1)
        self.updates = {c: rng.normal(size=length) * scale for c in self.clients}
        self.weights = dict(zip(self.clients, rng.uniform(0.1, 1, clients), strict=True))
        self.noise = noise
        self.server = Aggregation(self.how, 3, self.clients, length, seed=5, noise=noise)
        self.people = {c: Participant.fresh(self.how, 3, c) for c in self.clients}
        self.settings = {}  # of clients that do not follow the protocol
        self.vanish, self.change, self.seen, self.errors = vanish or {}, lambda stage, c, m: m, {}, {}

    def run(self):
        answers = self.ask("keys", dict.fromkeys(self.clients, b""))
        answers = self.ask("shares", self.server.receive_keys(answers))
        answers = self.ask("masked", self.server.receive_shares(answers, self.weights))
        return self.server.receive_unmask(self.ask("unmask", self.server.receive_masked(answers.items())))

    def ask(self, stage, messages):
        gone = {c for s in STAGES[: STAGES.index(stage) + 1] for c in self.vanish.get(s, ())}
        answers = {}
        for client, message in messages.items():
            if client in gone:
                continue
            # Through its bytes, as on a node that starts a process for every message.
            person = Participant.restore(
                self.settings.get(client, self.how), 3, client, self.people[client].dump()
            )
            rng = np.random.default_rng((7, client))
            noise = ClientNoise(self.noise, Noise(seeded_key(11, 3, client))) if self.noise else None
            arguments = {"keys": (), "masked": (message, self.updates[client], rng, noise)}.get(
                stage, (message,)
            )
            try:
                answers[client] = self.change(stage, client, getattr(person, stage)(*arguments))
            except WireError as error:
                self.errors[client] = str(error)
            self.people[client] = person
        self.seen[stage] = answers
        return answers

    def expected(self, alive):
        """The weighted sum, by NumPy alone."""
        total = np.zeros(len(next(iter(self.updates.values()))))
        for client in alive:
            d = self.updates[client]
            total += self.weights[client] * d * min(1, self.how.clip / np.sqrt((d * d).sum()))
        return total
