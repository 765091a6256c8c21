"""The demo: its images are the same each time and made once; it trains, records, and says what is missing."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
import workloads as wl
from PIL import Image
from sizes import slow

from minidl import demo
from minidl.check import check
from minidl.tracefile import events as ev
from minidl.tracefile.reader import read_trace

PHOTOGRAPHS = Path(demo.__file__).parent / "photos"


@pytest.fixture(scope="module")
def few(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two of the photographs, cut."""
    place = tmp_path_factory.mktemp("demo")
    (place / "sources").mkdir()
    for name in ("cat", "rocket"):
        (place / "sources" / f"{name}.jpg").write_bytes((PHOTOGRAPHS / f"{name}.jpg").read_bytes())
    return demo.cut_photographs(place / "photos", place / "sources")


def test_the_photographs_are_real_files_of_eight_kinds() -> None:
    photographs = sorted(PHOTOGRAPHS.glob("*.jpg"))
    assert len(photographs) == 8
    for path in photographs:
        with Image.open(path) as image:
            assert image.format == "JPEG"
            assert min(image.size) >= 300
        assert f"| {path.name} |" in (PHOTOGRAPHS / "README.md").read_text(), f"{path.name}: no licence is told"


@pytest.mark.heavy
def test_cuts_are_made_once_and_are_the_same_each_time(few: Path, tmp_path: Path) -> None:
    sources = few.parent / "sources"
    (tmp_path / "cat").mkdir()
    (tmp_path / "cat" / "cat.jpg").symlink_to(sources / "cat.jpg")
    again = demo.cut_photographs(tmp_path / "again", tmp_path / "cat")
    names, of_one = (sorted(path.relative_to(cut) for path in cut.rglob("*.jpg")) for cut in (few, again))
    assert len(names) == 2 * len(of_one) == 2 * demo.CUTS_PER_PHOTOGRAPH
    assert all((few / name).read_bytes() == (again / name).read_bytes() for name in of_one)
    assert len({(few / name).read_bytes() for name in names}) == len(names)
    before = (few / names[0]).stat().st_mtime_ns
    assert demo.cut_photographs(few, sources) == few
    assert (few / names[0]).stat().st_mtime_ns == before


def test_interrupted_cutting_leaves_nothing_that_looks_whole(tmp_path: Path) -> None:
    (tmp_path / "sources").mkdir()
    (tmp_path / "sources" / "broken.jpg").write_bytes(b"no image")
    with pytest.raises(OSError, match=r"broken\.jpg"):
        demo.cut_photographs(tmp_path / "photos", tmp_path / "sources")
    assert [path.name for path in tmp_path.iterdir()] == ["sources"]


def test_a_sample_is_decoded_and_augmented(few: Path) -> None:
    photos = demo.Photos(few)
    assert photos.classes == ["cat", "rocket"]
    image, label = photos[demo.CUTS_PER_PHOTOGRAPH]
    assert (tuple(image.shape), image.dtype, label) == ((3, demo.SIDE, demo.SIDE), torch.float32, 1)
    assert 0 <= image.min() < image.max() <= 1
    assert not torch.equal(image, photos[demo.CUTS_PER_PHOTOGRAPH][0])


def test_decoding_gives_the_files_pixels(tmp_path: Path) -> None:
    Image.new("RGB", (3, 2), (250, 10, 128)).save(tmp_path / "plain.png")
    pixels = demo.decode(tmp_path / "plain.png")
    assert pixels.tolist() == [[[250] * 3] * 2, [[10] * 3] * 2, [[128] * 3] * 2]


@pytest.mark.live
@pytest.mark.parametrize("workers", [*slow(0), 2])
def test_it_trains_and_what_it_recorded_is_sound(few: Path, tmp_path: Path, workers: int) -> None:
    options = demo.Options(workers=workers, epochs=2, batch_size=20, work_dir=tmp_path, images=few)
    threads = torch.get_num_threads()
    training = demo.train(options)
    assert training.trace == tmp_path / "trace-1"
    assert training.losses[1] < training.losses[0]
    trace = read_trace(training.trace)
    assert len(trace.select("yield")) == 12
    assert check(trace) == []
    assert torch.get_num_threads() == threads


ON_SIM = """
import sys
from pathlib import Path
from minidl import demo
here, images = map(Path, sys.argv[1:])
for pin, side_stream in ((True, True), (False, True), (True, False)):
    demo.train(demo.Options(1, 1, 40, here, images, device="sim", pin=pin, side_stream=side_stream))
"""


@pytest.mark.live
def test_on_the_simulated_accelerator_a_batch_goes_there_in_three_ways(
    few: Path, tmp_path: Path, simulate: None
) -> None:
    """In a process of its own: autograd knows the devices that there were at its first backward, and no later ones."""
    done = wl.run(ON_SIM, tmp_path, few)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("training on sim:0\nsimulated accelerator: pinned 0.1 GB/s") == 3
    aside, pageable, inside = traces = [read_trace(tmp_path / f"trace-{number}") for number in (1, 2, 3)]
    for trace in traces:
        assert check(trace) == []
        (model,) = trace.described("simulated accelerator")
        assert (model["pinned"], model["pageable"]) == (0.1, 0.04)
        assert trace.select("device_compute", ev.Phase.BEGIN)["y"].all(), "marked as simulated"
    size = 4 * 40 * 3 * demo.SIDE**2 + 8 * 40
    sizes = [(trace.select("h2d", ev.Phase.BEGIN)["x"].tolist(), trace.select("h2d", ev.Phase.BEGIN)["y"].tolist())
             for trace in traces]  # fmt: skip
    assert sizes == [([size] * 3, [0] * 3), ([0] * 3, [size] * 3), ([], [])]
    assert [[trace.text(row) for row in trace.select("device_compute", ev.Phase.BEGIN)] for trace in traces] == [
        ["step"] * 3, ["step"] * 3, ["step", "copy"] * 3,
    ]  # fmt: skip
    assert [len(trace.select("pin", ev.Phase.BEGIN)) for trace in traces] == [3, 0, 3]
    assert aside.select("copy").size == pageable.select("copy").size > inside.select("copy").size == 0


def test_a_device_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("MINIDL_SIMULATE_DEVICE", raising=False)
    with pytest.raises(demo.DemoError, match=r"it cannot train on cuda: .*accelerator"):
        demo.train(demo.Options(work_dir=tmp_path, device="cuda"))


@pytest.mark.parametrize("folders", [[], ["only"]])
def test_unsuitable_images_are_refused(tmp_path: Path, folders: list[str]) -> None:
    for folder in folders:
        (tmp_path / folder).mkdir()
        Image.new("RGB", (8, 8)).save(tmp_path / folder / "a.png")
    with pytest.raises(demo.DemoError, match=f"holds images of {len(folders)} class"):
        demo.train(demo.Options(images=tmp_path))


def test_without_pillow_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(demo.DemoError, match="pip install pillow"):
        demo.train(demo.Options(work_dir=tmp_path))
