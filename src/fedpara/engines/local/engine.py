"""The sequential engine: clients train one after another, on one copy of the model."""

from collections.abc import Iterator, Sequence

from fedpara.data import FederatedData
from fedpara.engines.client import Reply, client_round, own_model
from fedpara.engines.local.worker import Worker
from fedpara.engines.memory import ClientMemory, PendingMemory
from fedpara.engines.session import Session
from fedpara.errors import DataError
from fedpara.state import State
from fedpara.tasks import Score, Task
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
        self.worker = Worker(session.program, task)

    def train(self, round: int, clients: Sequence[int], message: Message, personal: bool) -> Iterator[Reply]:
        received = self.session.read_down(message, round)
        for client in clients:
            try:
                examples = self.data.client(client)
            except DataError as error:
                if self.data.pooled:  # a mistake in the federation, not one client's file
                    raise
                yield Reply(client, reason=f"its data could not be read: {error}")
                continue
            if not len(examples):
                yield Reply(client, reason="it holds no examples")
                continue
            reply, memory = client_round(
                self.session,
                self.worker,
                received,
                self.memory.get(client),
                examples,
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
