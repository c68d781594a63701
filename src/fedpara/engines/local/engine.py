"""The sequential engine: clients train one after another, on one copy of the model."""

from collections.abc import Iterator, Sequence

from fedpara.data import FederatedData
from fedpara.engines.client import Reply, client_round, own_model
from fedpara.engines.local.worker import Score, Worker
from fedpara.engines.memory import ClientMemory, PendingMemory
from fedpara.engines.session import Session
from fedpara.engines.task import Task
from fedpara.state import State
from fedpara.wire import Message


class Sequential:
    name = "sequential"

    def __init__(
        self,
        session: Session,
        task: Task,
        data: FederatedData,
        memory: ClientMemory,
        why: str = "one client after another on the CPU",
    ) -> None:
        self.why = why
        self.session = session
        self.task = task
        self.data = data
        self.memory = PendingMemory(memory)
        self.worker = Worker(session.program, task.augment)

    def train(self, round: int, clients: Sequence[int], message: Message, personal: bool) -> Iterator[Reply]:
        received = self.session.read_down(message, round)
        for client in clients:
            if self.data.size(client) == 0:
                yield Reply(client, reason="it holds no examples")
                continue
            reply, memory = client_round(
                self.session,
                self.worker,
                received,
                self.memory.get(client),
                self.data.client(client),
                round=round,
                client=client,
                test=self.data.client_test(client) if personal else None,
            )
            self.memory.hold(client, round, memory)
            yield reply

    def commit(self, round: int, clients: Sequence[int]) -> None:
        self.memory.commit(round, clients)

    def evaluate(self, state: State) -> Score | None:
        """The global model on the task's test set."""
        return self.worker.evaluate(state, self.task.test) if self.task.test is not None else None

    def score_clients(self, round: int, clients: Sequence[int], message: Message) -> Iterator[Reply]:
        model, _ = self.session.read_down(message, round)
        for client in clients:
            state = own_model(self.session, model, self.memory.get(client))
            yield Reply(client, before=self.worker.evaluate(state, self.data.client_test(client)))
