"""Advice after an error or a signal: it fits the text of the error, and not merely its class."""

from __future__ import annotations

import signal

import pytest

from minidl.hang import remedies

ADVICE = {
    "/dev/shm": (
        "RuntimeError: unable to allocate shared memory(shm) for file </torch_1_2_0>: No space left on device (28)",
        "RuntimeError: unable to write to file </torch_1_2_0>: No space left on device (28)",
        "OSError: [Errno 28] No space left on device: '/dev/shm/mine'",
    ),
    "df -i": ("OSError: [Errno 28] No space left on device", "OSError: [Errno 28] ...: '/tmp/cache/torch.bin'"),
    "set_sharing_strategy": (
        "RuntimeError: received 0 items of ancdata",
        "RuntimeError: unable to open shared memory object </torch_1_2_0> in read-write mode: Too many open files (24)",
    ),
    "ls -l /proc/PID/fd": ("OSError: [Errno 24] Too many open files: '/data/a.bin'",),
    "max_map_count": ("RuntimeError: unable to mmap 128 bytes from file <x>: Cannot allocate memory (12)",),
    "memory.max": ("MemoryError: can't allocate memory", "OSError: [Errno 12] Cannot allocate memory"),
    "ulimit -f": ("OSError: [Errno 27] File too large",),
    "quota": ("OSError: [Errno 122] Disk quota exceeded: '/home/a/x'",),
    "HDF5": ("BlockingIOError: [Errno 11] Unable to synchronously open file (unable to lock file, errno = 11)",),
    "ulimit -u": (
        "BlockingIOError: [Errno 11] Resource temporarily unavailable",
        "RuntimeError: can't start new thread",
    ),
    "on the CPU": (
        "RuntimeError: Cannot re-initialize CUDA in forked subprocess. To use CUDA with multiprocessing, ...",
    ),
    "in the worker": ("RuntimeError: This class is not fork-safe", "AttributeError: Can't pickle local object 'f.g'"),
    "transaction": ("sqlite3.OperationalError: database is locked",),
    "read the program's traceback": ("ValueError: 28 labels, 24 images", "KeyError: 'torch_weights'"),
}


@pytest.mark.parametrize(("words", "text"), [(words, text) for words, texts in ADVICE.items() for text in texts])
def test_the_advice_fits_the_error(words: str, text: str) -> None:
    assert words in remedies.after_error(text)


@pytest.mark.parametrize("in_user_code", [True, False])
def test_a_bus_error_in_a_sample_may_be_a_truncated_file(in_user_code: bool) -> None:
    said = remedies.after_signal(-signal.SIGBUS, 3, in_user_code)
    assert ("np.memmap" in said, "/dev/shm" in said) == (in_user_code, True)
