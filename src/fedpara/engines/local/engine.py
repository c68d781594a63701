"""The sequential engine: clients train one after another, on one copy of the model, on the CPU or a GPU."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from fedpara.cuda_graphs import CudaGraphs
from fedpara.data import FederatedData
from fedpara.engines.client import Reply, client_round, own_model, unreadable
from fedpara.engines.device import eager_precision_on, shown
from fedpara.engines.local.worker import Worker
from fedpara.engines.memory import ClientMemory, PendingMemory
from fedpara.engines.session import Session
from fedpara.engines.settings import Precision
from fedpara.engines.transfer import HOST, move, move_variables
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
        reason: str = "",
        *,
        device: torch.device = HOST,
        precision: Precision | None = None,
        stay: bool = True,
        capture: bool = True,
    ) -> None:
        """`reason` says why this engine was chosen. `stay`: trained states may stay on the device (`stays`).

        `capture`: on a GPU, replay local steps as CUDA graphs (`captured.py`).
        """
        self.session = session
        self.data = data
        self.memory = PendingMemory(memory)
        self.test_set = task.test
        on_gpu = device.type == "cuda"
        if on_gpu:
            self.test_set = task.test.on(device) if task.test is not None else None
            if data.pooled:
                self.data = replace(data, train=data.train.on(device))
        chosen = eager_precision_on(device, precision)
        self.stays = stay and on_gpu and session.algorithm.on_any_device and not session.stateful
        recorder = CudaGraphs(device, spare=True) if on_gpu and capture else None
        self.worker = Worker(session.program, task, device, chosen, self.stays, recorder)
        self._where = f"{shown(device)}, {chosen}" if on_gpu else shown(device)
        self._reason = reason

    @property
    def why(self) -> str:
        captured = self.worker.captured
        how = f"{self._where}, captured" if captured is not None and captured.recorded else self._where
        notes = captured.notes if captured is not None else []
        return "; ".join(filter(None, [f"one client after another on {how}", self._reason, *notes]))

    def train(self, round: int, clients: Sequence[int], message: Message, personal: bool) -> Iterator[Reply]:
        model, down = self.session.read_down(message, round)
        if self.stays:
            model, down = move(model, self.worker.device), move_variables(down, self.worker.device)
        for client in clients:
            try:
                examples = self.data.client(client)
            except DataError as error:
                if self.data.pooled:  # one set for all clients, so the error concerns all of them
                    raise
                yield Reply(client, reason=unreadable(error))
                continue
            if not len(examples):
                yield Reply(client, reason="it holds no examples")
                continue
            reply, memory = client_round(
                self.session,
                self.worker,
                (model, down),
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
        return self.worker.evaluate(state, self.test_set) if self.test_set is not None else None

    def score_clients(self, round: int, clients: Sequence[int], message: Message) -> Iterator[Reply]:
        model, _ = self.session.read_down(message, round)
        for client in clients:
            state = own_model(self.session, model, self.memory.get(client))
            yield Reply(client, before=self.worker.evaluate(state, self.data.client_test(client)))
