"""`minidl doctor --check`: what the doctor may see here, before there is a hang."""

from __future__ import annotations

from dataclasses import replace

import pytest
from made_evidence import SLEEPS, look, process, thread

from minidl import cli
from minidl.hang import allowed
from minidl.hang.evidence.model import MEMORY, Descriptor, RunEvidence, SeenProcess

STACK = ()
SEEN = replace(
    process(7, 1, replace(thread(7, STACK, SLEEPS, wchan="hrtimer_nanosleep"), read=(5, 5))),
    descriptors=(Descriptor(0, "file", "/dev/null"),),
)
HIDDEN = replace(
    process(7, 1, replace(thread(7, None, None, idle=-1.0), read=(-1, -1))),
    not_seen=(f"{MEMORY}: ptrace is not allowed",),
)


@pytest.mark.parametrize(("seen", "there"), [(SEEN, True), (HIDDEN, False)], ids=["all", "nothing"])
def test_each_kind_of_evidence_is_told_with_the_way_to_let_it_be_seen(seen: SeenProcess, there: bool) -> None:
    tests = [test for _, test, _ in allowed._KINDS[:7]]  # the last one is of the machine
    assert [test(seen, seen.threads[0]) for test in tests] == [there] * 7
    kind = allowed.Allowed("stacks", there, "install it")
    assert kind.line() == ("yes  stacks" if there else "no   stacks: install it")


@pytest.mark.live
def test_a_process_is_started_looked_at_and_ended(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", "--check"]) in (cli.OK, cli.FOUND)
    said = capsys.readouterr().out
    assert "when a thread ran last" in said
    assert "processes outside of this container" in said


@pytest.mark.live
def test_the_reason_without_stacks_is_told_and_others_processes_are_no_fault(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    old = "Python stacks: py-spy failed: unknown version of Python"

    def collected(pid: int, interval: float) -> RunEvidence:
        return look(replace(SEEN, pid=pid, not_seen=(old,), threads=(replace(HIDDEN.threads[0], tid=pid),)))

    monkeypatch.setattr(allowed, "collect", collected)
    monkeypatch.setattr(allowed, "_FIRST_NAMESPACE", 1)
    stacks, *_, container = allowed.allowed()
    assert stacks.otherwise.startswith("py-spy failed: unknown version of Python; pip install py-spy")
    assert (container.there, container.own) == (False, False)
    cli.main(["doctor", "--check"])
    assert "no   processes outside of this container: run the doctor on" in capsys.readouterr().out


def test_the_command_needs_a_target_or_the_check(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor"]) == cli.USAGE
    assert "--check" in capsys.readouterr().err
