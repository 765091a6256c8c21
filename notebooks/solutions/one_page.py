"""Solutions of 04_one_page."""

from typing import Any


def worker_loop(dataset: Any, index_queue: Any, result_queue: Any) -> None:
    while (task := index_queue.get()) is not None:
        idx, indices = task
        try:
            data: Any = [dataset[i] for i in indices]
        except Exception as error:
            data = error
        result_queue.put((idx, data))


def _try_put_index(self: Any) -> None:
    index = next(self.indices, None)
    if index is None:
        return
    self.task_info[self.send_idx] = worker = next(self.turn)
    self.crew.put(worker, index, self.send_idx)
    self.send_idx += 1
