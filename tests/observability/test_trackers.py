"""Trackers: chosen by name, started once and on one process, and never in the way of training."""

from __future__ import annotations

import argparse
import dataclasses
import enum
import errno
import functools
import json
import logging
import os
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from slipstream import PartialState
from slipstream.errors import ConfigError, StateError
from slipstream.observability.run_dir.folder import RunFolder, find_runs
from slipstream.observability.trackers.base import GeneralTracker, NullTracker, on_main_process
from slipstream.observability.trackers.hosted import WandBTracker
from slipstream.observability.trackers.local import LocalTracker
from slipstream.observability.trackers.on_disk import TensorBoardTracker
from slipstream.observability.trackers.registry import (
    ChosenTrackers,
    LoggerType,
    Trackers,
    filter_trackers,
    get_available_trackers,
    missing_account,
    register_tracker_class,
    resolve_trackers,
)
from slipstream.observability.trackers.values import flatten, to_plain


class Memory(GeneralTracker):
    """Keeps what it is told; `fails` are the verbs that raise."""

    name = "memory of a test"
    requires_logging_directory = False

    def __init__(self, run_name: str = "", fails: tuple[str, ...] = ()) -> None:
        self.run_name = run_name
        self.fails = fails
        self.told: list[Any] = []

    @property
    def tracker(self) -> list[Any]:
        return self.told

    def _note(self, verb: str, *what: Any) -> None:
        if verb in self.fails:
            raise OSError(f"{verb} is broken")
        self.told.append((verb, *what))

    def start(self) -> None:
        self._note("start")

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self._note("config", values)

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        self._note("log", values, step, kwargs)

    def finish(self) -> None:
        self._note("finish")


@pytest.fixture
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """wandb without a network; its service process ends with the test."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    monkeypatch.setenv("WANDB_SILENT", "true")
    yield tmp_path
    sys.modules["wandb"].teardown()


# -- choosing ---------------------------------------------------------------------------------------------------------


def test_resolve_in_order() -> None:
    """Names kinds instances and lists are resolved once each and in order."""
    own = Memory()
    found = resolve_trackers(["wandb", LoggerType.TENSORBOARD, own, "WandB", own], "runs")
    assert found == [WandBTracker, TensorBoardTracker, own]
    assert resolve_trackers(None, None) == []
    assert resolve_trackers("local", "runs") == [LocalTracker]
    assert (
        resolve_trackers({"wandb", "tensorboard"}, "runs")
        == resolve_trackers(("tensorboard", "wandb"), "runs")
        == [TensorBoardTracker, WandBTracker]
    )
    assert filter_trackers(["wandb", LoggerType.WANDB, own]) == ["wandb", own]


def test_resolve_all() -> None:
    """All are those that are installed."""
    found = resolve_trackers(LoggerType.ALL, "runs")
    assert [tracker.name for tracker in found] == get_available_trackers()
    assert {LocalTracker, TensorBoardTracker, WandBTracker} <= set(found)
    assert found.optional == {tracker.name for tracker in found}
    assert "local" not in resolve_trackers(["all", "local"], "runs").optional


@pytest.mark.parametrize(
    ("log_with", "complaint"),
    [
        ("tensorbord", r"'tensorbord' is not known \(did you mean tensorboard\?\): write one of local, .*, swanlab, all"),
        ("wandb,local", r"several names are a list: \['wandb', 'local'\]"),
        (3, "3 is not a tracker"),
        ("local", "needs a folder to write to: pass project_dir"),
        ([Memory(), Memory()], "several trackers of the name memory of a test"),
    ],
)
def test_invalid_log_with(log_with: Any, complaint: str) -> None:
    """What cannot be used is refused with what to write."""
    with pytest.raises(ConfigError, match=complaint):
        resolve_trackers(log_with, None)


def test_missing_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """A package that is not installed is named with its command."""
    monkeypatch.setattr("slipstream.observability.trackers.registry.installed", lambda name: False)
    with pytest.raises(ConfigError, match=r"needs the package wandb, which is not installed: pip install 'slipstream\[wandb\]'"):
        resolve_trackers("wandb", None)
    assert get_available_trackers() == [LoggerType.LOCAL]


def test_user_class_by_name() -> None:
    """A class of the users is found by its name."""
    assert register_tracker_class(Memory) is Memory
    assert resolve_trackers("Memory of a test", None) == [Memory]
    with pytest.raises(ConfigError, match="'wandb' is the name of another tracker"):
        register_tracker_class(type("Mine", (Memory,), {"name": "wandb"}))
    with pytest.raises(ConfigError, match="not a class derived from GeneralTracker"):
        register_tracker_class(dict)  # type: ignore[arg-type]


def test_incomplete_tracker() -> None:
    """A tracker that lacks something is refused."""
    class Half(GeneralTracker):
        name = "half"

    with pytest.raises(ConfigError, match="Half has no requires_logging_directory, no tracker"):
        resolve_trackers(Half(), None)


# -- a run ------------------------------------------------------------------------------------------------------------


def test_order_of_calls() -> None:
    """A run starts stores logs and ends in order."""
    own = Memory()
    trackers = Trackers([own], None, is_main_process=True)
    trackers.start("project", argparse.Namespace(lr=0.1))
    trackers.log({"loss": 1}, step=3, log_kwargs={own.name: {"commit": True}})
    assert trackers.get(own.name) is own
    assert trackers.get(own.name, unwrap=True) is own.told
    trackers.finish()
    trackers.finish()
    assert own.told == [("start",), ("config", {"lr": 0.1}), ("log", {"loss": 1}, 3, {"commit": True}), ("finish",)]
    with pytest.raises(StateError, match="call init_trackers first"):
        trackers.get(own.name)


def test_init_kwargs() -> None:
    """Classes get the project and keywords of their own."""
    trackers = Trackers([Memory], None, is_main_process=True)
    trackers.start("project", None, {Memory.name: {"fails": ("log",)}})
    made = trackers.get(Memory.name)
    assert (made.run_name, made.fails) == ("project", ("log",))


def test_wrong_names_and_second_start() -> None:
    """Names that fit no tracker and a second start are errors."""
    trackers = Trackers([Memory()], None, is_main_process=True)
    with pytest.raises(ConfigError, match="init_kwargs has wandb, but log_with has memory of a test"):
        trackers.start("project", None, {"wandb": {}})
    for given, complaint in ((5, "init_kwargs=5 is not a dict"), ({Memory.name: 5}, "memory of a test, 5, is not a dict of keywords")):
        with pytest.raises(ConfigError, match=complaint):
            trackers.start("project", None, given)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="init_kwargs has foo for local, which takes name, resume"):
        Trackers([LocalTracker], ".", is_main_process=True).start("project", None, {"local": {"foo": 1}})
    with pytest.raises(ConfigError, match="is an object already"):
        trackers.start("project", None, {Memory.name: {"run_name": "x"}})
    trackers.start("project")
    with pytest.raises(ConfigError, match="log_kwargs has wandb"):
        trackers.log({}, log_kwargs={"wandb": {}})
    with pytest.raises(StateError, match="end_training"):
        trackers.start("project")
    with pytest.raises(StateError, match="no such tracker runs; there is memory of a test"):
        trackers.get("wandb")


def test_failing_start() -> None:
    """A failing start raises and ends those that had started."""
    good, bad = Memory(), type("Bad", (Memory,), {"name": "bad"})(fails=("start",))
    trackers = Trackers([good, bad], None, is_main_process=True)
    with pytest.raises(OSError, match="start is broken"):
        trackers.start("project")
    assert good.told == [("start",), ("finish",)]
    assert trackers.started == []


def test_failing_log(caplog: pytest.LogCaptureFixture) -> None:
    """A failing log or finish is said once and the others go on."""
    bad, good = Memory(fails=("log", "finish")), type("Good", (Memory,), {"name": "good"})()
    trackers = Trackers([bad, good], None, is_main_process=True)
    trackers.start("project")
    with caplog.at_level(logging.WARNING):
        for step in range(3):
            trackers.log({"loss": step}, step=step)
        trackers.finish()
    said = caplog.messages
    assert said == [
        "the tracker memory of a test failed in log (OSError: log is broken); the run continues, and this is reported once",
        "the tracker memory of a test failed in finish (OSError: finish is broken); the run continues, and this is reported once",
    ]
    assert [entry[0] for entry in good.told] == ["start", "log", "log", "log", "finish"]


def test_local_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """The local tracker alone is written to directly: with the same lines, of short writes too, and the same warnings."""
    trackers = Trackers([LocalTracker], tmp_path, is_main_process=True)
    trackers.start("project")
    trackers.log({"loss": torch.tensor(0.5), "lr": 1}, step=1)
    trackers.log({"loss": 0.25, "note": "late"}, step=numpy.int64(2))  # type: ignore[arg-type]
    write = os.write
    for failing in (lambda file, data: write(file, data[:9]), _no_space, write):
        monkeypatch.setattr(os, "write", failing)
        trackers.log({"loss": 0.125}, step=3)
    trackers.started.append(own := Memory())
    trackers.log({"loss": 1.0})
    (run,) = find_runs(tmp_path)
    lines = (run / "metrics.jsonl").read_text().splitlines()
    found = [json.loads(line) for line in lines if line.endswith("}}")][1:]
    assert [(line["step"], line["values"]) for line in found] == [
        (1, {"loss": 0.5, "lr": 1}),
        (2, {"loss": 0.25, "note": "late"}),
        (3, {"loss": 0.125}),
        (3, {"loss": 0.125}),
        (None, {"loss": 1.0}),
    ]
    assert own.told == [("log", {"loss": 1.0}, None, {})]
    assert [text.count("No space left") for text in caplog.messages] == [1]


def _no_space(*arguments: Any) -> int:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_log_before_start(caplog: pytest.LogCaptureFixture) -> None:
    """Logging before the start is said once."""
    trackers = Trackers([Memory()], None, is_main_process=True)
    trackers.log({"loss": 1})
    trackers.log({"loss": 1})
    assert caplog.messages == [
        "log() goes nowhere: trackers (memory of a test) run from init_trackers(...) to end_training()"
    ]
    Trackers([], None, is_main_process=True).log({"loss": 1})
    assert len(caplog.records) == 1


def test_step_types() -> None:
    """A step is a whole number whoever counted it."""
    own = Memory()
    trackers = Trackers([own], None, is_main_process=True)
    trackers.start("project")
    for step in (3, torch.tensor(4), numpy.int64(5), 6.0):
        trackers.log({"loss": 1}, step=step)  # type: ignore[arg-type]
    assert [entry[2] for entry in own.told if entry[0] == "log"] == [3, 4, 5, 6]
    for wrong in (1.5, "three", torch.zeros(2)):
        with pytest.raises(ConfigError, match="is not a whole number"):
            trackers.log({"loss": 1}, step=wrong)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="values are a dict of names"):
        trackers.log(0.5, step=1)  # type: ignore[arg-type]


def test_images_and_tables(tmp_path: Path, caplog: Any) -> None:
    """Pictures and tables reach those that keep them and the others are named once."""
    trackers = Trackers([*resolve_trackers("local", tmp_path), Memory], tmp_path, is_main_process=True)
    trackers.log_images({})
    trackers.start("project")
    for step in (1, 2):
        trackers.log_images({"sample": numpy.zeros((2, 2))}, step=step, log_kwargs={"local": {"caption": "dark"}})
        trackers.log_table("answers", columns=["a"], data=[[1]], step=step)
    trackers.log_images({"sample": "no picture"}, step=3)
    lines = [json.loads(line) for line in trackers.get("local").path.read_text().splitlines()][1:]
    trackers.finish()
    assert [line["step"] for line in lines] == [1, 1, 2, 2]
    assert lines[0]["caption"] == "dark"
    assert [message.split(":")[0] for message in caplog.messages] == [
        "log_images() goes nowhere",
        "the tracker memory of a test does not store pictures",
        "the tracker memory of a test does not store tables",
        "the picture sample is left out",
    ]


def test_unsupported_values(tmp_path: Path, caplog: Any) -> None:
    """Each value that is no number is named once and what is one is kept."""
    trackers = Trackers(resolve_trackers("local", tmp_path), tmp_path, is_main_process=True)
    trackers.start("project")
    for step in range(2):
        trackers.log({"loss": 1.0, "weights": [1, 2]}, step=step)
        trackers.log({"settings": object()}, step=step)
    values = [json.loads(line).get("values") for line in trackers.get("local").path.read_text().splitlines()]
    trackers.finish()
    assert values == [None, {"loss": 1.0}, {"loss": 1.0}]
    assert [message.split(",")[0] for message in caplog.messages] == ["weights is a list", "settings is an object"]


def test_warning_limits(tmp_path: Path, caplog: Any) -> None:
    """Every kind of mistake is said once for each name and twenty at most."""
    trackers = Trackers(resolve_trackers("local", tmp_path), tmp_path, is_main_process=True)
    trackers.start("project")
    for _ in range(2):
        trackers.log_images({"x": None, "good": numpy.zeros((2, 2))})
        trackers.log_images({"x": None, "y": "text"})
        trackers.log_table("a", data=[1])
        trackers.log_table("b", data=[1])
    last = json.loads(trackers.get("local").path.read_text().splitlines()[-1])
    assert list(last["images"]) == ["good"]
    assert [message.split(":")[0] for message in caplog.messages] == [
        "the picture x is left out",
        "the picture y is left out",
        "the table a is left out",
        "the table b is left out",
    ]
    caplog.clear()
    for place in range(30):
        trackers.log({f"name {place}": None, "name": []})
    trackers.finish()
    assert len(caplog.messages) == 20
    assert caplog.messages[0].startswith("name 0 is None and name is a list, and the tracker local stores")
    assert caplog.messages[1].startswith("name 1 is None, and")
    assert caplog.messages[-1].endswith("further ones of local in log are not reported")
    with pytest.raises(ConfigError, match=r"log_images\(\) has a Tensor of \(3, 2, 2\): pictures are a dict of names"):
        trackers.log_images(torch.zeros(3, 2, 2))  # type: ignore[arg-type]


class Unwilling(Memory):
    """A tracker of "all" that has no server to talk to."""

    name = "unwilling"


def test_all_without_failing(caplog: Any) -> None:
    """Of all those that cannot start are left out and say so once."""
    broken, good = Unwilling(fails=("start",)), Memory()
    trackers = Trackers(ChosenTrackers([broken, good], optional=["unwilling"]), None, is_main_process=True)
    trackers.start("project", {"lr": 1})
    trackers.log({"loss": 1}, step=1)
    trackers.get("unwilling").log_images({})
    assert [type(tracker) for tracker in trackers.started] == [NullTracker, Memory]
    trackers.finish()
    assert broken.told == [("finish",)]
    assert [entry[0] for entry in good.told] == ["start", "config", "log", "finish"]
    assert caplog.messages == [
        "log_with='all' leaves out unwilling: it cannot start (OSError: start is broken)"
    ]


def test_all_without_accounts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    """All starts no service that nobody set up."""
    for variable in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_BASE_URL"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr("slipstream.observability.trackers.registry.installed", lambda name: name == "wandb")
    trackers = Trackers(resolve_trackers("all", tmp_path), tmp_path, is_main_process=True)
    trackers.start("project")
    assert [type(tracker).__name__ for tracker in trackers.started] == ["NullTracker", "LocalTracker"]
    trackers.finish()
    assert caplog.messages == ["log_with='all' leaves out wandb: no account is set up (wandb login, or WANDB_MODE=offline)"]
    assert missing_account("wandb", {"HOME": str(tmp_path)}) is not None
    (tmp_path / ".netrc").write_text("")
    assert missing_account("wandb", {"HOME": str(tmp_path)}) is None


def test_local_tracker_gets_folder(tmp_path: Path) -> None:
    """The folder of a run goes to the local tracker."""
    folder = RunFolder.create(tmp_path, "mine", project="project")
    trackers = Trackers([*resolve_trackers("local", tmp_path), Memory], tmp_path, is_main_process=True)
    trackers.start("project", None, folder=folder)
    assert trackers.get("local", unwrap=True) == folder.path
    trackers.finish()


def test_other_processes(ranks: Any, tmp_path: Path) -> None:
    """Other processes hold null objects and every call is safe."""
    def run(folder: str) -> Any:
        state = PartialState()
        trackers = Trackers(resolve_trackers(["local", "tensorboard"], folder), folder, is_main_process=state.is_main_process)
        trackers.start("run", {"lr": 1}, {"tensorboard": {"flush_secs": 5}})
        trackers.log({"loss": float(state.process_index)}, step=1)
        trackers.get("tensorboard").log_images({})
        trackers.get("tensorboard", unwrap=True).add_text("a", "b")
        if not state.is_main_process:
            trackers.get("local", unwrap=True).summary["best"] = 1
        kinds = [type(tracker).__name__ for tracker in trackers.started]
        trackers.finish()
        return kinds

    assert ranks(2).run(run, str(tmp_path)) == [["LocalTracker", "TensorBoardTracker"], ["NullTracker", "NullTracker"]]
    (run_folder,) = find_runs(tmp_path)
    lines = [json.loads(line) for line in (run_folder / "metrics.jsonl").read_text().splitlines()]
    assert [line.get("values") for line in lines] == [None, {"loss": 0.0}]


def test_tracker_on_every_process(ranks: Any) -> None:
    """A tracker may work on every process."""
    def run() -> Any:
        only_main = on_main_process  # what a class body alone refers to does not travel

        class Everywhere(GeneralTracker):
            name = "everywhere"
            requires_logging_directory = False
            main_process_only = False
            tracker = None
            logged = 0

            @only_main
            def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
                self.logged += 1

        class OnMain(Everywhere):
            name = "on main"
            main_process_only = True

        here, main = Everywhere(), OnMain()
        here.log({})
        main.log({})  # before any state: the rank comes from the launcher's variables
        assert not torch.distributed.is_initialized()
        trackers = Trackers([here], None, is_main_process=PartialState().is_main_process)
        trackers.start("run")
        trackers.log({})
        return here.logged, main.logged

    assert ranks(2).run(run) == [(2, 1), (2, 0)]


def test_null_tracker() -> None:
    """A null tracker takes everything."""
    null = NullTracker("wandb")
    null.log_table("t", data=[])
    assert null.name == "wandb"
    assert not null.tracker
    null.tracker.config.update(a=1)
    with pytest.raises(AttributeError):
        null.__len__()


# -- values -----------------------------------------------------------------------------------------------------------


def test_plain_settings() -> None:
    """Settings of any kind become plain data."""
    class Color(enum.Enum):
        RED = "red"

    @dataclasses.dataclass
    class Options:
        path: Path
        size: int

    @dataclasses.dataclass
    class Slots:
        __slots__ = ("size",)
        size: int

    class Broken:
        def __str__(self) -> str:
            raise RuntimeError

    again: list[Any] = [1]
    again.append(again)
    given = {
        "tensor": torch.tensor([1.5, 2.0]),
        "large": torch.zeros(2000),
        "array": numpy.float32(0.5),
        "enum": Color.RED,
        "options": Options(Path("a/b"), 3),
        "device": torch.device("cpu"),
        "class": Path,
        "function": print,
        "nan": float("nan"),
        "again": again,
        ("a", 1): {1, 2},
        "truth": True,
        "lambda": lambda: 0,
        "partial": functools.partial(print, 1),
        "nowhere": torch.zeros(2, device="meta"),
        "half": torch.ones(1, dtype=torch.bfloat16),
        "slots": Slots(3),
        "broken": Broken(),
        "spaces": types.SimpleNamespace(a=torch.float16),
    }
    result = to_plain(given)
    assert json.loads(json.dumps(result, allow_nan=False)) == result
    assert result["tensor"] == [1.5, 2.0]
    assert result["large"] == "Tensor of (2000,)"
    assert result["array"] == 0.5
    assert result["enum"] == "red"
    assert result["options"] == {"path": "a/b", "size": 3}
    assert (result["device"], result["class"], result["nan"], result["truth"]) == ("cpu", "Path", "nan", True)
    assert result["again"] == [1, "(the same again)"]
    assert (result["partial"], result["nowhere"], result["half"]) == ("partial of print", "Tensor of (2,)", [1.0])
    assert (result["slots"], result["spaces"]) == ({"size": 3}, {"a": "torch.float16"})
    assert result["broken"] == "(Broken, whose text fails with RuntimeError)"
    assert result["lambda"].endswith("<lambda>")
    assert result["['a', 1]"] == [1, 2]


def test_deep_and_colliding_names() -> None:
    """What is nested too deep is cut and names that meet are both kept."""
    deep: Any = 1
    for _ in range(3000):
        deep = {"d": deep}
    shown = json.dumps(to_plain({"deep": deep, "flat": 1}))
    assert '"..."' in shown
    assert '"flat": 1' in shown
    assert list(flatten({"deep": deep}).values())[0].keys() == {"d"}
    assert flatten({"a/b": 1, "a": {"b": 2}}) == {"a/b": 1, "a/b-2": 2}


# -- the trackers themselves ------------------------------------------------------------------------------------------


def test_wandb_offline(offline: Path) -> None:
    """Wandb offline keeps settings values and steps."""
    trackers = Trackers(resolve_trackers("wandb", None), None, is_main_process=True)
    trackers.start("portable", {"lr": 0.01, "model": torch.nn.Linear(1, 1)}, {"wandb": {"name": "first"}})
    run = trackers.get("wandb", unwrap=True)
    trackers.log({"loss": torch.tensor(0.5)}, step=3)
    trackers.log({"loss": 0.25}, step=5)
    trackers.log_images({"sample": [numpy.zeros((2, 2, 3), dtype=numpy.uint8)], "batch": torch.rand(2, 3, 4, 5)}, step=6)
    trackers.log_table("table", columns=["a"], data=[[torch.tensor(1)]], step=7)
    assert (run.project, run.name, run.step) == ("portable", "first", 7)
    assert run.config["lr"] == 0.01
    assert run.config["model"].startswith("Linear(")
    assert run.summary["loss"] == 0.25
    trackers.finish()
    runs = [path for path in (offline / "wandb").glob("offline-run-*") if path.is_dir()]
    assert len(runs) == 1, "one run, not two"
    assert list(runs[0].glob("*.wandb"))
    assert len(list((runs[0] / "files" / "media" / "images").glob("*.png"))) == 3
    (table,) = (runs[0] / "files" / "media" / "table").glob("*.json")
    assert json.loads(table.read_text())["data"] == [[1]]


def test_tensorboard(tmp_path: Path) -> None:
    """Tensorboard writes scalars with steps texts charts and settings."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    trackers = Trackers(resolve_trackers("tensorboard", tmp_path), tmp_path, is_main_process=True)
    trackers.start("run", {"lr": 0.1, "model": {"layers": [1, 2], "bias": True, "kind": None}})
    trackers.log({"loss": torch.tensor(0.5), "note": "hello", "both": {"a": 1, "b": torch.tensor(2)}}, step=4)
    trackers.log({"loss": 0.25}, step=9)
    trackers.log_images({"sample": torch.zeros(1, 3, 2, 2), "sizes": [numpy.zeros((2, 2)), numpy.zeros((3, 3))]}, step=9)
    trackers.log_table("answers", columns=["a"], data=[[1]], step=9)
    trackers.finish()
    events = EventAccumulator(str(tmp_path / "run")).Reload()
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [(4, 0.5), (9, 0.25)]
    assert {"sample", "sizes/0", "sizes/1"} <= set(events.Tags()["images"])
    (answers,) = events.Tensors("answers/text_summary")
    assert (answers.step, answers.tensor_proto.string_val[0]) == (9, b"| a |\n|---|\n| 1 |")
    assert (tmp_path / "run" / "both_b").is_dir()
    assert "layers:\n  - 1\n  - 2" in (tmp_path / "run" / "hparams.yml").read_text()


def test_tensorboard_unsupported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Tensorboard says what it has no chart for."""
    trackers = Trackers(resolve_trackers("tensorboard", tmp_path), tmp_path, is_main_process=True)
    trackers.start("run")
    trackers.log({"weights": torch.zeros(3)}, step=1)
    trackers.finish()
    assert "weights is a Tensor of (3,), and the tracker tensorboard stores numbers and texts" in caplog.text
