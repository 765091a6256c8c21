"""The recording suite: its images, its scenes on the simulated device, and the table made from what they hold."""

from __future__ import annotations

from pathlib import Path

import pytest

import minidl
from minidl.device import sim
from minidl.prove.recordings import __main__ as command
from minidl.prove.recordings import images, suite, table
from minidl.prove.recordings.scenes import SCENES, Recording
from minidl.prove.recordings.training import Setting
from minidl.record import recorder
from minidl.tracefile import events as ev

ROOT = Path(__file__).parents[3]


# --- Images -----------------------------------------------------------------------------------------------------------
def test_images_are_drawn_once_and_tell_their_class(tmp_path: Path) -> None:
    directory = images.draw(tmp_path / "images", 20, 24)
    stamps = {path: path.stat().st_mtime_ns for path in directory.iterdir()}
    assert images.draw(directory, 20, 24) == directory
    assert {path: path.stat().st_mtime_ns for path in directory.iterdir()} == stamps
    dataset = images.Images(directory, 30)
    assert [dataset[index][1] for index in range(30)] == [*range(10), *range(10), *range(10)]
    pixels, _ = dataset[3]
    assert (pixels.shape, pixels.dtype.itemsize) == ((24, 24, 3), 1)
    as_float, _ = images.Images(directory, 30, as_float=True)[3]
    assert (as_float.shape, as_float.dtype.itemsize) == ((3, 24, 24), 4)
    hues = [dataset[index][0].float().mean((0, 1)) for index in range(10)]
    assert min(float((a - b).norm()) for a in hues for b in hues if a is not b) > 10


# --- The suite --------------------------------------------------------------------------------------------------------
def make(directory: Path, *arguments: str) -> int:
    sim.built()  # without a compiler the test is skipped
    return command.main(["--device", "sim", "-o", str(directory), *arguments])


@pytest.mark.live
@pytest.mark.timeout(240)
def test_two_scenes_from_end_to_end(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert make(tmp_path, "--only", "shutdown-closed", "shutdown-exhausted") == 0, capfd.readouterr().err
    said = capfd.readouterr()
    assert [line.split(":")[0] for line in said.err.splitlines()] == [
        "1 of 2  shutdown-closed",
        "2 of 2  shutdown-exhausted",
    ]
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "README.md",
        "shutdown-closed.minidl",
        "shutdown-exhausted.minidl",
    ]
    trace = minidl.read_trace(tmp_path / "shutdown-closed.minidl")
    (told,) = trace.described("recording")
    assert (told["name"], told["device"], told["accelerator"]) == ("shutdown-closed", "sim", "simulated accelerator")
    how = ["python", "-m", "minidl.prove.recordings", "--device", "sim", "--only", "shutdown-closed"]
    assert trace.manifest["command"] == how
    text = (tmp_path / "README.md").read_text()
    assert text.count("| simulated | no accelerator, ") == 2
    assert f"Not yet recorded on a GPU: {', '.join(SCENES)}." in text
    before = (tmp_path / "shutdown-closed.minidl").stat().st_mtime_ns
    assert make(tmp_path, "--minutes", "0") == 1  # nothing new is begun
    assert "shutdown-closed: exists already" in capfd.readouterr().err
    assert (tmp_path / "shutdown-closed.minidl").stat().st_mtime_ns == before
    assert (tmp_path / "README.md").read_text() == text


def _fails(setting: Setting, directory: Path) -> Path:
    raise AssertionError("never called: a scene runs in a process of its own")


@pytest.mark.live
def test_a_scene_that_fails_is_said_and_the_others_are_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(SCENES, "unheard-of", Recording("unheard-of", "what the other process does not know", _fails))
    made = suite.Suite("sim", tmp_path)
    assert made.record(["unheard-of"]) == ["unheard-of"]
    said = capfd.readouterr().err
    assert said.startswith("1 of 1  unheard-of: FAILED after ")
    assert "KeyError: 'unheard-of'" in said
    assert list(tmp_path.iterdir()) == []


def recorded(directory: Path, *, spoilt: bool = False) -> Path:
    with minidl.trace(directory):
        list(minidl.DataLoader(range(4)))
        if spoilt:
            recorder.active().emit(ev.YIELD, 1, 3)
    return directory


@pytest.mark.live
@pytest.mark.parametrize(("limit", "spoilt", "said"), [
    (100, False, "the limit is 100"), (suite.LIMIT, True, "its trace breaks a rule"),
])  # fmt: skip
def test_a_recording_that_is_too_large_or_breaks_a_rule_is_not_kept(
    limit: int, spoilt: bool, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(suite, "LIMIT", limit)
    with pytest.raises(suite.RecordingError, match=said):
        suite.Suite("sim", tmp_path)._packed("x", recorded(tmp_path / "trace", spoilt=spoilt))
    assert [path.name for path in tmp_path.iterdir()] == ["trace"]


@pytest.mark.live
def test_a_real_recording_is_worth_more_than_a_simulated_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    there = recorded(tmp_path / "trace")
    minidl.read_trace(there).pack(tmp_path / "x.minidl")
    for told, on_cuda, on_nothing in (("cuda", True, True), ("sim", False, True)):
        monkeypatch.setattr(suite, "facts", lambda trace, told=told: {"device": told})
        assert suite.Suite("cuda", tmp_path)._there("x") is on_cuda
        assert suite.Suite("sim", tmp_path)._there("x") is on_nothing
    assert not suite.Suite("cuda", tmp_path)._there("y")


def test_the_tables_place_in_a_readme_is_kept(tmp_path: Path) -> None:
    readme = tmp_path / "README.md"
    readme.write_text(f"# Mine\n\nbefore\n{table.BEGIN}\nold\n{table.END}\nafter\n")
    table.write_table(tmp_path)
    text = readme.read_text()
    assert text.startswith("# Mine\n\nbefore\n")
    assert text.endswith(f"{table.END}\nafter\n")
    assert "old" not in text
    table.write_table(tmp_path)
    assert readme.read_text() == text


def test_without_a_gpu_the_simulated_device_must_be_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    for argv, said in ((["-o", str(tmp_path)], "--device sim;"), (["--only", "no-such"], "no-such")):
        with pytest.raises(SystemExit) as exit_:
            command.main(argv)
        assert exit_.value.code == 2
        assert said in capsys.readouterr().err


def test_the_list_of_recordings(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--list"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == list(SCENES)


@pytest.mark.heavy
def test_what_is_committed_is_as_the_table_says() -> None:
    text = (ROOT / "traces" / "README.md").read_text()
    between = text.split(table.BEGIN)[1].split(table.END)[0]
    assert between.strip() == table.table(ROOT / "traces").strip()
