"""CohortExamples: a cohort's examples on the device, and its round plans.

A federation in one set stays on the device. One that is read client by client is copied there in each round.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from fedpara.data import Examples, FederatedData
from fedpara.engines.batched.lane_state import LaneState
from fedpara.engines.batched.round_plan import RoundPlan, plan_round
from fedpara.engines.participation.cohorts import Cohorts
from fedpara.engines.session import Session
from fedpara.errors import ConfigError
from fedpara.tasks import Augment

SPARE_ROOM = 1.25
"""The memory for a cohort's examples, relative to the first cohort's size. A larger cohort needs a new graph."""


class CohortExamples:
    def __init__(
        self,
        session: Session,
        data: FederatedData,
        augment: Augment,
        device: torch.device,
        cohorts: Cohorts,
    ) -> None:
        self._session, self._data, self._augment, self._device = session, data, augment, device
        self._cohorts = cohorts
        self.current: Examples = data.train.on(device) if data.pooled else data.train
        self._rows: Mapping[int, NDArray[np.int64]] = {}
        self._ahead: tuple[int, Sequence[int], RoundPlan] | None = None

    @property
    def device(self) -> torch.device:
        return self._device

    def read(self, clients: Sequence[int]) -> dict[int, str]:
        """Reads the cohort's examples. Returns why those of some clients could not be read."""
        if not self._data.pooled:
            self.current = self._data.train  # frees the last cohort's examples
        pool, self._rows, problems = self._data.pool(clients)
        if not self._data.pooled:
            self.current = pool
        return problems

    def size(self, client: int) -> int:
        """How many examples a client of the cohort holds."""
        return len(self._rows.get(client, ()))

    def allocate(self) -> Examples:
        """The training set on the device; or room for a cohort's examples."""
        if self._data.pooled or self._device.type == "cpu":
            return self.current
        return self.current.on(self._device).room(int(len(self.current) * SPARE_ROOM))

    def put_into(self, lane_state: LaneState) -> None:
        """Copies a cohort's examples into their room, unless they are always on the device."""
        if not self._data.pooled:
            lane_state.feed.hold(self.current)

    def plan(self, round: int, clients: Sequence[int], lanes: int, session: Session) -> RoundPlan:
        """The plan of one training. Only that of the server's model is made ahead."""
        if session is self._session and self._ahead is not None and self._ahead[:2] == (round, clients):
            return self._ahead[2]
        return self._plan(session, round, clients, lanes, self._rows)

    def plan_ahead(self, round: int, clients: Sequence[int], lanes: int) -> None:
        """Plans the next round while the device still works on this one.

        Skipped if these clients are only a part of the drawn cohort (ranks, clients without examples).
        """
        if self._device.type == "cpu" or not self._data.pooled:
            return
        if self._ahead is not None and self._ahead[0] == round + 1:  # by the first training of this round
            return
        try:
            chosen = self._cohorts.present(round + 1)
        except ConfigError:  # of a sampler: it ends the run in that round, if there is one
            return
        if (
            not all(map(self._data.size, chosen))
            or self._cohorts.present(round) != list(clients)
            or not chosen
        ):
            return
        rows = {client: self._data.indices(client) for client in chosen}
        self._ahead = (round + 1, chosen, self._plan(self._session, round + 1, chosen, lanes, rows))

    def forget_plan(self) -> None:
        """Drops the plan that was made ahead, because it does not fit a changed number of lanes."""
        self._ahead = None

    def _plan(
        self,
        session: Session,
        round: int,
        clients: Sequence[int],
        lanes: int,
        rows: Mapping[int, NDArray[np.int64]],
    ) -> RoundPlan:
        return plan_round(session, [rows[client] for client in clients], self._augment, round, clients, lanes)
