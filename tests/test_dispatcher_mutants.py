"""The dispatcher, broken on purpose: each mutant must be caught by the checker that the dispatcher passes.

A mutant that survives would mean that a rule of the dispatcher is not checked by anything.
"""

from __future__ import annotations

from typing import Any

import pytest
from dispatcher_scripts import Script, play, scripts
from hypothesis import Phase, find, settings

from minidl.loader.dispatcher import EPOCH_END, STALE, STORED, Assignment, Deliver, Dispatcher, Signal, TaskInfo, Wait


class DeliversOutOfOrder(Dispatcher):
    def receive(self, idx: int, data: Any) -> Deliver | Signal:
        step = super().receive(idx, data)
        return self._deliver(idx) if step is STORED else step


class NeverStores(Dispatcher):
    """Drops what comes before its turn."""

    def receive(self, idx: int, data: Any) -> Deliver | Signal:
        step = super().receive(idx, data)
        if step is STORED:
            del self.task_info[idx]
        return step


class RcvdIdxOffByOne(Dispatcher):
    def _deliver(self, idx: int) -> Deliver:
        step = super()._deliver(idx)
        self.rcvd_idx += idx == self.send_idx - 2
        return step


class RcvdIdxStuck(Dispatcher):
    def _deliver(self, idx: int) -> Deliver:
        before = self.rcvd_idx
        step = super()._deliver(idx)
        self.rcvd_idx = before
        return step


class SendIdxReused(Dispatcher):
    def assign(self, index: Any) -> Assignment | None:
        given = super().assign(index)
        self.send_idx -= given is not None and given.idx == 5
        return given


class SendIdxSkips(Dispatcher):
    def assign(self, index: Any) -> Assignment | None:
        given = super().assign(index)
        self.send_idx += self.send_idx == 7
        return given


class RoundRobinRestarts(Dispatcher):
    def assign(self, index: Any) -> Assignment | None:
        self._turn = 0
        return super().assign(index)


class RoundRobinSurvivesReset(Dispatcher):
    def reset(self) -> None:
        turn = getattr(self, "_turn", 0)
        super().reset()
        self._turn = turn


class SendsToTheEnded(Dispatcher):
    def _next_worker(self) -> int | None:
        worker_id, self._turn = self._turn, (self._turn + 1) % self.num_workers
        return worker_id


class NobodyTakesAnEndedWorkersTurn(Dispatcher):
    def _next_worker(self) -> int | None:
        worker_id, self._turn = self._turn, (self._turn + 1) % self.num_workers
        return worker_id if self.workers_status[worker_id] else None


class NoCapacityCheck(Dispatcher):
    def check_capacity(self) -> None: ...


class CapacityOffByOne(Dispatcher):
    @property
    def capacity(self) -> int:
        return self.prefetch_factor * self.num_workers + 1


class NoRoomCheck(Dispatcher):
    """Out of order, a slow worker gets as much as a fast one."""

    def _has_room(self, worker_id: int) -> bool:
        return True


class RoomOfAllWorkers(Dispatcher):
    """The room of ended workers is not shared by the others."""

    def _has_room(self, worker_id: int) -> bool:
        return self.workers_num_tasks[worker_id] < self.prefetch_factor


class RoomCheckedInOrderToo(Dispatcher):
    def _next_worker(self) -> int | None:
        for _ in range(self.num_workers):
            worker_id, self._turn = self._turn, (self._turn + 1) % self.num_workers
            if self.workers_status[worker_id] and self._has_room(worker_id):
                return worker_id
        return None


class ForgetsToCountDown(Dispatcher):
    def receive(self, idx: int, data: Any) -> Deliver | Signal:
        step = super().receive(idx, data)
        self.tasks_outstanding += 1
        return step


class ForgetsToCountDownTheExhausted(Dispatcher):
    def exhausted(self, idx: int, worker_id: int) -> None:
        super().exhausted(idx, worker_id)
        self.tasks_outstanding += 1


class ForgetsToCountDownTheStale(Dispatcher):
    def receive(self, idx: int, data: Any) -> Deliver | Signal:
        step = super().receive(idx, data)
        self.tasks_outstanding += step is STALE
        return step


class ForgetsThatAWorkerHasLessToDo(Dispatcher):
    def _deliver(self, idx: int) -> Deliver:
        step = super()._deliver(idx)
        self.workers_num_tasks[step.worker_id] += 1
        return step


class CountsDownOnArrival(Dispatcher):
    """A batch in the reorder buffer counts as delivered by its worker."""

    def receive(self, idx: int, data: Any) -> Deliver | Signal:
        step = super().receive(idx, data)
        if step is STORED:
            self.workers_num_tasks[self.task_info[idx].worker_id] -= 1
        return step


class ExhaustedStaysActive(Dispatcher):
    def exhausted(self, idx: int, worker_id: int) -> None:
        super().exhausted(idx, worker_id)
        self.workers_status[worker_id] = True


class OneEndsAllEnd(Dispatcher):
    def exhausted(self, idx: int, worker_id: int) -> None:
        super().exhausted(idx, worker_id)
        self.workers_status = [False] * self.num_workers


class WaitsForTheDead(Dispatcher):
    def worker_unavailable(self, worker_id: int) -> None: ...


class EndsAtTheFirstGap(Dispatcher):
    """The epoch ends when the task whose turn it is will not come, though later ones will."""

    def next_step(self) -> Deliver | Wait | Signal:
        info = self.task_info.get(self.rcvd_idx)
        if info is not None and not info.fetched and not self.workers_status[info.worker_id]:
            return EPOCH_END
        return super().next_step()


class GivesUpEverythingOfTheEnded(Dispatcher):
    """Also what has arrived already and waits in the reorder buffer."""

    def next_step(self) -> Deliver | Wait | Signal:
        for idx, info in list(self.task_info.items()):
            if info.fetched and not self.workers_status[info.worker_id]:
                del self.task_info[idx]
        return super().next_step()


class YieldsTheStale(Dispatcher):
    def receive(self, idx: int, data: Any) -> Deliver | Signal:
        if idx in self._given_up:
            self.task_info[idx] = TaskInfo(0, "stale")
            self._given_up.discard(idx)
        return super().receive(idx, data)


class RemembersTheLastEpoch(Dispatcher):
    def reset(self) -> None:
        status = getattr(self, "workers_status", None)
        super().reset()
        self.workers_status = status or self.workers_status


class PeeksPastTheHead(Dispatcher):
    """Yields whatever is ready where the head of the line is not."""

    def next_step(self) -> Deliver | Wait | Signal:
        step = super().next_step()
        ready = [idx for idx, info in self.task_info.items() if info.fetched]
        return self._deliver(ready[0]) if isinstance(step, Wait) and ready else step


MUTANTS = [cls for cls in Dispatcher.__subclasses__() if cls.__module__ == __name__]


def is_caught(mutant: type[Dispatcher], script: Script) -> bool:
    try:
        play(mutant, script)
    except (AssertionError, KeyError):  # a DispatchError is an AssertionError: the mutant caught itself
        return True
    return False


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda cls: cls.__name__)
def test_mutant_is_caught(mutant: type[Dispatcher]) -> None:
    script = find(
        scripts(),
        lambda script: is_caught(mutant, script),
        settings=settings(max_examples=1000, phases=[Phase.generate], derandomize=True, database=None, deadline=None),
    )
    assert not is_caught(Dispatcher, script), "the dispatcher itself fails on the script that catches the mutant"
