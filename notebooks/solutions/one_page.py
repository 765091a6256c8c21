"""Solutions of 04_one_page."""

from typing import Any

from minidl.mini import _attempt


def worker_loop(fetch: Any, index_queue: Any, data_queue: Any, done_event: Any) -> None:
    while True:
        idx, index = index_queue.get()
        if idx is None:
            break
        if not done_event.is_set():
            data_queue.put((idx, _attempt("in my worker", fetch, index)))


def _try_put_index(self: Any) -> None:
    try:
        index = self._next_index()
    except StopIteration:
        return
    worker_id = next(self._worker_queue_idx_cycle)
    self._index_queues[worker_id].put((self._send_idx, index))
    self._task_info[self._send_idx] = (worker_id,)
    self._send_idx += 1
