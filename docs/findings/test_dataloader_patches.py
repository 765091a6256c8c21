"""Tests of the patches in the form of torch's own suite: `python patched.py all test_dataloader_patches.py`.

To be appended to torch's test/test_dataloader.py. They need `pip install expecttest`, as torch's suite does.
"""

import os
import select
import signal
import threading
import time
import unittest
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from unittest import mock

import torch
import torch.multiprocessing as mp
from torch.testing._internal.common_utils import TestCase, run_tests
from torch.utils.data import DataLoader, Dataset, IterableDataset, _utils, get_worker_info

JOIN_TIMEOUT = 30.0


class _Picky(Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        return (lambda: index) if index == 1 else index


class _Unreadable:
    def __setstate__(self, state):
        raise ValueError("cannot be rebuilt")

    def __init__(self):
        self.full = True


def _first_unreadable(index):
    return index if index else _Unreadable()


class _Deaf(Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(3600)


class _Hanging(Dataset):
    def __len__(self):
        return 100

    def __getitem__(self, index):
        if index:
            time.sleep(3600)
        return index


class _Texts(Dataset):
    def __len__(self):
        return 100

    def __getitem__(self, index):
        return "x" * 100_000


class _KilledWithTheLock(IterableDataset):
    """Worker 0 has no samples. It is killed when it has said so, before it releases the lock of the pipe."""

    def __iter__(self):
        if get_worker_info().id:
            return iter(range(20))

        def write_and_die(connection, message, write=Connection._send):
            write(connection, message)
            os.kill(os.getpid(), signal.SIGKILL)

        Connection._send = write_and_die
        return iter(())


class _Sticky:
    """A batch that is never pinned: until `released` is set, its pin_memory() does not return."""

    released = threading.Event()

    def pin_memory(self):
        self.released.wait()


def _sticky(samples):
    return _Sticky()


class _OnceInterrupted(threading.Event):
    interrupted = False

    def set(self):
        if not self.interrupted:
            self.interrupted = True
            raise KeyboardInterrupt
        super().set()


def _interrupt(timeout=None):
    raise KeyboardInterrupt


def _tear(connection, message):
    os.write(connection.fileno(), message[: len(message) // 2])
    os.kill(os.getpid(), signal.SIGKILL)


def _pin_without_accelerator():
    """A pin thread on a machine without an accelerator; what is pinned must do it by its own method."""
    return mock.patch.multiple(
        torch.accelerator,
        is_available=lambda: True,
        current_accelerator=lambda: torch.device("cuda"),
        current_device_index=lambda: 0,
        set_device_index=lambda index: None,
    )


def _shut_down_and_exit():
    with _pin_without_accelerator():
        iterator = iter(DataLoader(list("abcd"), num_workers=1, pin_memory=True, batch_size=None))
        next(iterator)
    iterator._worker_result_queue._wlock.acquire()  # as a worker that is killed in a write
    iterator._pin_memory_thread.join = _interrupt
    try:
        iterator._shutdown_workers()
    except KeyboardInterrupt:
        pass


def _be_killed_in_a_task(dataset, held):
    iterator = iter(DataLoader(dataset, num_workers=2, batch_size=None))
    time.sleep(1.0)
    Connection._send = _tear
    next(iterator)
    time.sleep(JOIN_TIMEOUT)


def _be_killed(dataset, held):
    iterator = iter(DataLoader(dataset, num_workers=2, batch_size=None))
    next(iterator)
    time.sleep(1.0)
    os.kill(os.getpid(), signal.SIGKILL)


@unittest.skipIf(os.name != "posix", "kills processes by signals")
class TestDataLoaderHoles(TestCase):
    def test_unpicklable_batch(self):
        iterator = iter(DataLoader(_Picky(), num_workers=1, batch_size=None))
        self.assertEqual(next(iterator), 0)
        with self.assertRaisesRegex(RuntimeError, "could not be sent to the main process"):
            next(iterator)
        self.assertEqual(list(iterator), [2, 3])

    def test_unwritable_task(self):
        batches = [range(2), (i for i in range(2, 4))]
        iterator = iter(DataLoader(range(4), batch_sampler=batches, num_workers=1))
        next(iterator)
        with self.assertRaisesRegex(RuntimeError, "could not be sent to a worker"):
            next(iterator)

    def test_unreadable_batch(self):
        iterator = iter(DataLoader(range(3), num_workers=1, batch_size=None, collate_fn=_first_unreadable))
        with self.assertRaisesRegex(ValueError, "cannot be rebuilt"):
            next(iterator)
        self.assertEqual(list(iterator), [1, 2])

    def test_torn_result(self):
        def init(worker_id):
            Connection._send = _tear

        loader = DataLoader(range(4), num_workers=1, batch_size=None, worker_init_fn=init)
        with ThreadPoolExecutor(1) as pool:  # no SIGCHLD handler in a thread
            found = pool.submit(list, loader)
            with self.assertRaisesRegex(RuntimeError, "exited unexpectedly"):
                found.result(JOIN_TIMEOUT)

    def test_done_event_has_no_lock(self):
        iterator = iter(DataLoader(range(4), num_workers=1))
        self.assertFalse(hasattr(iterator._workers_done_event, "_cond"))

    def test_worker_that_ignores_sigterm(self):
        iterator = iter(DataLoader(_Deaf(), num_workers=1, timeout=1))
        worker = iterator._workers[0]
        with self.assertRaisesRegex(RuntimeError, "timed out"):
            next(iterator)
        iterator._shutdown_workers()
        self.assertFalse(worker.is_alive())

    def test_workers_are_joined_before_one_deadline(self):
        iterator = iter(DataLoader(_Hanging(), num_workers=6))
        next(iterator)
        began = time.monotonic()
        iterator._shutdown_workers()
        self.assertLess(time.monotonic() - began, 3 * _utils.MP_STATUS_CHECK_INTERVAL)

    def test_interrupted_reset(self):
        loader = DataLoader(range(8), num_workers=2, persistent_workers=True)
        list(loader)
        queue = loader._iterator._data_queue
        queue.get = _interrupt
        with self.assertRaises(KeyboardInterrupt):
            iter(loader)
        del queue.get
        self.assertEqual(len(list(loader)), 8)

    def test_exhausted_worker_that_was_killed(self):
        loader = DataLoader(_KilledWithTheLock(), num_workers=2, batch_size=None)
        with ThreadPoolExecutor(1) as pool:  # no SIGCHLD handler in a thread
            found = pool.submit(list, loader)
            with self.assertRaisesRegex(RuntimeError, "exited unexpectedly"):
                found.result(JOIN_TIMEOUT)

    def test_pin_thread_that_does_not_end(self):
        self.addCleanup(_Sticky.released.set)
        with _pin_without_accelerator():
            loader = DataLoader(range(4), num_workers=1, pin_memory=True, timeout=1, collate_fn=_sticky)
            iterator = iter(loader)
        with self.assertRaisesRegex(RuntimeError, "timed out|Pin memory thread"):
            next(iterator)
        with self.assertWarnsRegex(UserWarning, "left behind"):
            iterator._shutdown_workers()

    def test_interrupted_shutdown_ends_the_pin_thread(self):
        with _pin_without_accelerator():
            iterator = iter(DataLoader(list("abcd"), num_workers=1, pin_memory=True, batch_size=None))
            next(iterator)
        iterator._pin_memory_thread_done_event.__class__ = _OnceInterrupted
        with self.assertRaises(KeyboardInterrupt):
            iterator._shutdown_workers()
        iterator._pin_memory_thread.join(JOIN_TIMEOUT)
        self.assertFalse(iterator._pin_memory_thread.is_alive())

    def test_exit_without_the_pin_thread_sentinel(self):
        process = mp.get_context("fork").Process(target=_shut_down_and_exit)
        process.start()
        process.join(JOIN_TIMEOUT)
        self.addCleanup(process.kill)
        self.assertEqual(process.exitcode, 0)

    def _assert_no_orphans(self, dataset, main=_be_killed):
        ended, held = os.pipe()
        self.addCleanup(os.close, ended)
        process = mp.get_context("fork").Process(target=main, args=(dataset, held))
        process.start()
        os.close(held)
        process.join(JOIN_TIMEOUT)
        left, _, _ = select.select([ended], [], [], JOIN_TIMEOUT)
        self.assertTrue(left, "workers outlive a killed main process")

    def test_orphans_with_a_full_pipe(self):
        self._assert_no_orphans(_Texts())

    def test_orphans_in_a_sample(self):
        self._assert_no_orphans(_Hanging())

    def test_orphans_with_a_torn_task(self):
        self._assert_no_orphans(range(100), _be_killed_in_a_task)


if __name__ == "__main__":
    run_tests()
