"""Python stacks of other processes, through py-spy."""

from __future__ import annotations

from pathlib import Path

from minidl.hang.evidence import stacks
from minidl.hang.evidence.model import Frame


def test_py_spy_has_a_bound_for_all_processes_together() -> None:
    why: dict[int, str] = {}
    assert stacks.spied([1, 2], why.__setitem__, program="/no/py-spy", altogether=0.0) == {}
    assert why == dict.fromkeys((1, 2), "py-spy took 0 s for the processes before")


def test_a_sleeps_source_has_the_heads_of_the_blocks_that_it_is_in(tmp_path: Path) -> None:
    code = """def take(path):
    for _ in range(3):
        pass
    while True:
        try:
            return os.open(path, os.O_EXCL)
        except FileExistsError:

            time.sleep(0.05)
    time.sleep(1)
"""
    file = tmp_path / "data.py"
    file.write_text(code)
    assert stacks.source_of(str(file), 9) == "while True: except FileExistsError: time.sleep(0.05)"
    assert stacks.source_of(str(file), 10) == "time.sleep(1)"
    assert stacks.source_of(str(file), 6) == "return os.open(path, os.O_EXCL)"


def test_a_frame_has_the_locks_that_its_function_took_around_its_line_and_before(tmp_path: Path) -> None:
    code = """class D:
    def get(self):
        other.acquire()
        other.release()
        with closed: pass
        if not self.lock.acquire():
            with ignored: pass
        with self.table, open(path) as file:
            for row in file:
                self.read(row)
    def read(self, row):
        return row
"""
    file = tmp_path / "data.py"
    file.write_text(code)
    around = (
        "with self.table, open(path) as file:",
        "if not self.lock.acquire():",
        "other.release()",
        "other.acquire()",
    )
    assert stacks.frame_at("D.get", str(file), 10, {}).within == around
    assert stacks.frame_at("D.read", str(file), 12, {}).within == ()
    assert stacks.frame_at("<module>", str(file), 1, {}).within == ()


def test_names_of_lock_files_are_kept_and_no_other_text() -> None:
    seen = {"path": '"/data/a.lock"', "key": "'secret'", "file": "'/data/secret.txt'", "i": "7"}
    seen["_"] = "(14, <frame at 0x7f1>)"  # the arguments of a signal handler
    kept = stacks.kept("/home/a/data.py", seen)
    assert kept == {"path": '"/data/a.lock"', "i": "7", "_": "<frame at 0x7f1>"}
    assert stacks.named_lock_files([Frame("f", "a.py", 1, kept)]) == ["/data/a.lock"]
