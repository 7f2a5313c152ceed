"""The local tracker: lines that are there at once, that say exactly what was logged, and that a crash cannot spoil."""

from __future__ import annotations

import io
import json
import math
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given, settings, strategies as st
from PIL import Image

from slipstream.errors import ConfigError
from slipstream.observability.run_dir.folder import INDEX_EVERY, INDEX_RECORD, RunFolder, read_info
from slipstream.observability.trackers import local
from slipstream.observability.trackers.images import encode_png, to_image, to_images
from slipstream.observability.trackers.local import LocalTracker
from slipstream.observability.trackers.values import UnsupportedTypeError


def lines_of(tracker: LocalTracker) -> list[Any]:
    return [json.loads(line) for line in tracker.path.read_bytes().split(b"\n")[:-1]]


@pytest.fixture
def tracker(tmp_path: Path) -> Any:
    made = LocalTracker("project", tmp_path, name="run")
    made.start()
    yield made
    made.finish()


# -- lines ----------------------------------------------------------------------------------------------------------------


def test_one_line_per_call(tracker: LocalTracker) -> None:
    """Every call is a line that can be read at once."""
    tracker.store_init_configuration({"lr": torch.tensor(0.5)})
    tracker.log({"loss": 2.0, "seen": 7}, step=7)
    tracker.log({"loss": torch.tensor(2.0), "worst": float("-inf"), "eval": {"good": True, "note": "é"}})
    tracker.log_table("answers", ["question", "score"], [["x", torch.tensor(1)]], step=8)
    first, *rest = lines_of(tracker)
    assert (first["run"], first["config"]) == ("project", {"lr": 0.5})
    assert [(line["step"], line.get("values") or line["table"]) for line in rest] == [
        (7, {"loss": 2.0, "seen": 7}),
        (None, {"loss": 2.0, "worst": "-inf", "eval/good": 1, "eval/note": "é"}),
        (8, {"name": "answers", "columns": ["question", "score"], "rows": [["x", 1]]}),
    ]
    assert first["started"] - 0.01 <= rest[0]["time"] <= rest[1]["time"] <= rest[2]["time"]


@settings(max_examples=40)
@given(values=st.dictionaries(st.text(max_size=8), st.floats() | st.integers() | st.booleans() | st.text(max_size=5), max_size=4))
def test_lines_exact(tmp_path_factory: pytest.TempPathFactory, values: dict[str, Any]) -> None:
    """A line says exactly what was logged."""
    tracker = LocalTracker("any", tmp_path_factory.mktemp("any"))
    tracker.start()
    tracker.log(values, step=2**40)
    (line,) = lines_of(tracker)[1:]
    tracker.finish()
    expected = {name: str(value) if isinstance(value, float) and not math.isfinite(value) else value for name, value in values.items()}
    assert line["values"] == expected
    assert line["step"] == 2**40


def test_plain_numbers_fast_path(tracker: LocalTracker, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plain numbers and tensors of one element on the host take the short way."""
    tracker.store_init_configuration({})
    monkeypatch.delattr(local, "sort_values")
    tracker.log({"loss": 0.1, "step": 3}, step=1)
    tracker.log({"loss": torch.tensor([0.5], requires_grad=True), "step": torch.tensor(4)}, step=2)
    for bad in (float("nan"), torch.tensor(float("inf")), torch.ones(2), torch.ones((), device="meta"), torch.tensor(True)):
        with pytest.raises(NameError):
            tracker.log({"loss": bad}, step=3)
    assert [line["values"] for line in lines_of(tracker)[1:]] == [{"loss": 0.1, "step": 3}, {"loss": 0.5, "step": 4}]


def test_unsupported_value(tracker: LocalTracker) -> None:
    """What is no number is named and the rest is kept."""
    with pytest.raises(
        UnsupportedTypeError, match=r"weights is a Tensor of \(3,\) and nothing is None, and the tracker local stores numbers"
    ):
        tracker.log({"loss": 1.0, "weights": torch.zeros(3), "nothing": None}, step=1)
    assert lines_of(tracker)[1]["values"] == {"loss": 1.0}


def test_index(tracker: LocalTracker) -> None:
    """The index finds every 1024th line."""
    for step in range(2 * INDEX_EVERY + 5):
        tracker.log({"loss": float(step)}, step=step)
    content = tracker.path.read_bytes()
    entries = list(INDEX_RECORD.iter_unpack(tracker.path.with_suffix(".index").read_bytes()))
    assert [number for number, *_ in entries] == [0, INDEX_EVERY, 2 * INDEX_EVERY]
    for number, offset, step, _ in entries[1:]:
        assert json.loads(content[offset:].split(b"\n", 1)[0])["step"] == step == number - 1


# -- folders --------------------------------------------------------------------------------------------------------------


def test_resume_and_taken_name(tmp_path: Path) -> None:
    """A run that goes on has a first line of its own and a name that is taken is refused."""
    for loss, resume in ((1.0, False), (2.0, True)):
        tracker = LocalTracker("project", tmp_path, name="run", resume=resume)
        tracker.start()
        tracker.log({"loss": loss})
        tracker.finish()
    assert [line.get("values", "start") for line in lines_of(tracker)] == ["start", {"loss": 1.0}, "start", {"loss": 2.0}]
    assert read_info(tracker.tracker)["state"] == "finished"
    assert len(read_info(tracker.tracker)["attempts"]) == 2
    with pytest.raises(ConfigError, match="a run named 'run' exists"):
        LocalTracker("project", tmp_path, name="run").start()


def test_given_folder(tmp_path: Path) -> None:
    """A folder that is given is left to its owner."""
    folder = RunFolder.create(tmp_path, "mine", project="project")
    tracker = LocalTracker("project", tmp_path, folder=folder)
    tracker.start()
    tracker.store_init_configuration({"lr": 1})
    tracker.finish()
    assert tracker.tracker == folder.path
    assert read_info(folder.path)["state"] == "running"
    assert not (folder.path / "config.json").exists()
    with pytest.raises(ConfigError, match="has the name 'other' and a folder of the run 'mine'"):
        LocalTracker("project", tmp_path, name="other", folder=folder)


def test_unnamed_folders(tmp_path: Path) -> None:
    """Without a name each run has a folder and its settings in it."""
    made = [LocalTracker("team/project", tmp_path) for _ in range(2)]
    for tracker in made:
        tracker.start()
        tracker.store_init_configuration({"lr": 1, "rule": lambda: 0})
        tracker.finish()
    assert made[0].tracker != made[1].tracker
    assert made[0].tracker.name.startswith("team-project-")
    kept = json.loads((made[0].tracker / "config.json").read_text())["settings"]
    assert kept["lr"] == 1
    assert kept["rule"].endswith("<lambda>")


def test_not_started(tmp_path: Path) -> None:
    """What cannot be written or was not started is said."""
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be made below .*give a folder of yours as project_dir"):
        LocalTracker("run", tmp_path / "file").start()
    with pytest.raises(ConfigError, match=r"not started: call start\(\) first"):
        LocalTracker("run", tmp_path).log({"loss": 1.0})


def test_removed_folder(tracker: LocalTracker, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder that is removed during the run is said."""
    tracker.log({"loss": 1.0})
    shutil.rmtree(tracker.tracker)
    monkeypatch.setattr(tracker, "_look_at", math.inf)
    tracker.log({"loss": 1.0})  # between two looks nobody knows
    monkeypatch.setattr(tracker, "_look_at", 0.0)
    with pytest.raises(FileNotFoundError, match=r"metrics.jsonl was removed during the run"):
        tracker.log({"loss": 1.0})
    with pytest.raises(FileNotFoundError, match="was removed"):
        tracker.finish()
    tracker.finish()


def test_killed_writer(tmp_path: Path, rounds: Any) -> None:
    """A writer that is killed at any moment leaves every confirmed line readable."""
    script = Path(__file__).with_name("killed_writers.py")
    command = [sys.executable, str(script), str(tmp_path), str(rounds(ci=12, soak=500))]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.split("FOUND ")[1])
    assert all(found["whole"])
    assert set(found["more"]) <= {0, 1}  # a line may be in the file before its writer could say so
    assert found["unreadable"] <= len(found["whole"])
    assert found["lines"] > len(found["whole"])


# -- pictures -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("channels", [1, 2, 3, 4])
def test_png_encoding(channels: int) -> None:
    """A PNG of ours is what others read."""
    given = numpy.random.default_rng(channels).integers(0, 256, (7, 5, channels), dtype=numpy.uint8)
    read = numpy.asarray(Image.open(io.BytesIO(encode_png(given))))
    assert numpy.array_equal(read.reshape(given.shape), given)


def test_image_kinds() -> None:
    """Pictures of every kind become the same bytes."""
    wanted = numpy.random.default_rng(0).integers(0, 256, (6, 5, 3), dtype=numpy.uint8)
    wanted[0, 0, 0] = 255
    first = numpy.ascontiguousarray(wanted.transpose(2, 0, 1))
    kinds: dict[str, Any] = {
        "array": wanted,
        "whole numbers": wanted.astype(numpy.int64),
        "floats": wanted.astype(numpy.float64) / 255,
        "large floats": wanted.astype(numpy.float32),
        "channels first": first,
        "tensor": torch.from_numpy(first),
        "tensor of floats": torch.from_numpy(first).float().div(255).requires_grad_(),
        "tensor with channels last": torch.from_numpy(wanted),
        "PIL": Image.fromarray(wanted),
        "figure": Figure(wanted),
    }
    for kind, entry in kinds.items():
        assert numpy.array_equal(to_image(entry)[:, :, :3], wanted), kind
    assert [image.shape for image in to_images(torch.zeros(2, 3, 6, 5))] == [(6, 5, 3)] * 2
    assert [image.shape for image in to_images([wanted, Image.new("L", (4, 2))])] == [(6, 5, 3), (2, 4, 1)]
    assert to_image(torch.tensor([[True, False]])).tolist() == [[[255], [0]]]
    assert to_image(numpy.array([[math.nan, -1.0, 1.2]])).tolist() == [[[0], [0], [255]]]
    assert to_image(torch.full((1, 2, 2), 0.5, dtype=torch.bfloat16)).tolist() == [[[128], [128]], [[128], [128]]]


class Figure:
    """What `pictures` asks of a figure of matplotlib."""

    dpi = 100.0

    def __init__(self, shown: Any) -> None:
        self.shown = numpy.concatenate([shown, numpy.full((*shown.shape[:2], 1), 255, dtype=numpy.uint8)], axis=2)

        class Box:
            bounds = (0.0, 0.0, float(shown.shape[1]), float(shown.shape[0]))

        self.bbox = Box()

    def savefig(self, file: Any, format: str, dpi: float) -> None:
        assert (format, dpi) == ("rgba", self.dpi)
        file.write(self.shown.tobytes())


@pytest.mark.parametrize("given", ["a text", 3, numpy.zeros((5, 6, 7)), numpy.zeros((0, 4, 3)), numpy.zeros((2, 2), dtype=complex)])
def test_no_image(given: Any) -> None:
    """What is not a picture is refused with what is."""
    with pytest.raises(TypeError, match=r"not a picture: give|is not supported: give"):
        to_image(given)


@pytest.mark.parametrize("huge", [10**400, -(10**5000)], ids=["plus", "minus"])
def test_integers_beyond_floats(tracker: LocalTracker, huge: int) -> None:
    """An integer that is no float is stored as infinite, and the other values of its call are kept."""
    tracker.store_init_configuration({})
    tracker.log({"loss": 0.5, "huge": huge})
    tracker.log({"text": "a", "huge": huge})
    sign = "inf" if huge > 0 else "-inf"
    assert [line["values"] for line in lines_of(tracker)[1:]] == [{"loss": 0.5, "huge": sign}, {"huge": sign, "text": "a"}]


def test_step_beyond_index(tracker: LocalTracker) -> None:
    """A step that an entry of the index cannot hold is written like any other."""
    tracker.store_init_configuration({})
    for _ in range(INDEX_EVERY + 1):
        tracker.log({"loss": 0.5}, step=2**70)
    assert [line["step"] for line in lines_of(tracker)[1:]] == [2**70] * (INDEX_EVERY + 1)


def test_image_files(tracker: LocalTracker) -> None:
    """Pictures are files of the run that its lines name."""
    tracker.log_images({"a/b": torch.rand(2, 3, 4, 5), "a-b": numpy.zeros((4, 5))}, step=3)
    (line,) = lines_of(tracker)[1:]
    assert (line["step"], {name: len(files) for name, files in line["images"].items()}) == (3, {"a/b": 2, "a-b": 1})
    files = [file for files in line["images"].values() for file in files]
    assert len(set(files)) == 3
    assert {Image.open(io.BytesIO((tracker.tracker / file).read_bytes())).size for file in files} == {(5, 4)}
    assert len(list((tracker.tracker / "media").iterdir())) == 3
