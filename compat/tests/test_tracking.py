"""Trackers of the drop-in: Accelerate's registry and rules, with tensorboard and wandb themselves, offline."""

from __future__ import annotations

import importlib.util
import json
from typing import Any, ClassVar

import pytest
from accelerate import Accelerator, tracking
from accelerate.state import PartialState
from accelerate.tracking import GeneralTracker, TensorBoardTracker, filter_trackers, on_main_process, register_tracker_class
from accelerate.utils import LoggerType, ProjectConfiguration

needs_tensorboard = pytest.mark.skipif(importlib.util.find_spec("tensorboard") is None, reason="needs the package tensorboard")


class ListTracker(GeneralTracker):
    """Keeps what it is told."""

    name = "list"
    requires_logging_directory = False
    made: ClassVar[list[Any]] = []

    def __init__(self, run_name: str = "mine", **options: Any) -> None:
        super().__init__()
        self.run_name, self.options = run_name, options
        self.calls: list[Any] = []
        self.made.append(self)

    @property
    def tracker(self) -> list[Any]:
        return self.calls

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self.calls.append(("config", values))

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **options: Any) -> None:
        self.calls.append((values, step, options))

    @on_main_process
    def finish(self) -> None:
        self.calls.append("finished")


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The registry of classes, put back afterwards."""
    monkeypatch.setattr(ListTracker, "made", [])
    monkeypatch.setattr(tracking, "LOGGER_TYPE_TO_CLASS", dict(tracking.LOGGER_TYPE_TO_CLASS))
    return tracking.LOGGER_TYPE_TO_CLASS


# -- trackers of the user -------------------------------------------------------------------------------------------------


def test_an_instance_of_the_user(registry):
    """It gets settings, values with their keywords, and the end; it needs no project name, and stays after the end."""
    mine = ListTracker()
    accelerator = Accelerator(cpu=True, log_with=mine)
    assert accelerator.log_with == [mine]
    accelerator.init_trackers(None, {"rate": 0.1})
    accelerator.log({"loss": 1.5}, step=3, log_kwargs={"list": {"commit": True}, "wandb": {"commit": False}})
    assert accelerator.get_tracker("list") is mine
    assert accelerator.get_tracker("list", unwrap=True) is mine.calls
    accelerator.end_training()
    assert mine.calls == [("config", {"rate": 0.1}), ({"loss": 1.5}, 3, {"commit": True}), "finished"]
    assert accelerator.trackers == [mine]


def test_a_class_that_was_registered(registry):
    """`log_with` takes its name, and makes it with the project and its keywords where the run begins."""
    register_tracker_class(ListTracker)
    assert registry["list"] is ListTracker
    accelerator = Accelerator(cpu=True, log_with="list")
    assert ListTracker.made == []
    accelerator.init_trackers("project", init_kwargs={"list": {"team": "blue"}})
    (made,) = ListTracker.made
    assert (made.run_name, made.options) == ("project", {"team": "blue"})
    accelerator.end_training()
    with pytest.warns(UserWarning, match="replaces ListTracker"):
        register_tracker_class(type("Other", (ListTracker,), {}))


def test_keywords_of_trackers_that_do_not_run(registry):
    """Scripts pass those of every tracker that a user may choose: a warning, and nothing else."""
    accelerator = Accelerator(cpu=True, log_with=ListTracker())
    with pytest.warns(UserWarning, match=r"init_kwargs for wandb has no effect"):
        accelerator.init_trackers("project", init_kwargs={"wandb": {"name": "x"}})
    accelerator.end_training()


@pytest.mark.parametrize("missing", ["name", "requires_logging_directory", "tracker"])
def test_an_incomplete_class(missing):
    """A tracker without what all have cannot be made, as in Accelerate."""
    body = {"name": "x", "requires_logging_directory": False, "tracker": property(lambda self: None)}
    del body[missing]
    with pytest.raises(NotImplementedError, match=missing):
        type("Incomplete", (GeneralTracker,), body)()


@pytest.mark.parametrize("wrong", [int, type("Nameless", (GeneralTracker,), {"requires_logging_directory": False}), "list"])
def test_what_cannot_be_registered(wrong):
    with pytest.raises(ValueError, match="register_tracker_class"):
        register_tracker_class(wrong)


# -- names in log_with ------------------------------------------------------------------------------------------------------


def test_names_are_sifted(tmp_path, monkeypatch):
    """Each once; a package that is missing is left out with a warning; an unknown name is a ValueError; a folder may be needed."""
    monkeypatch.setattr(tracking, "_installed_trackers", lambda: [tracking._AllTypes.TENSORBOARD])
    assert filter_trackers(["tensorboard", LoggerType.TENSORBOARD], tmp_path) == [LoggerType.TENSORBOARD]
    mine = ListTracker()
    assert filter_trackers([mine, "tensorboard"], tmp_path) == [mine, LoggerType.TENSORBOARD]
    with pytest.warns(UserWarning, match="not installed"):
        assert filter_trackers(["comet_ml", "tensorboard"], tmp_path) == [LoggerType.TENSORBOARD]
    assert filter_trackers("all", tmp_path) == [LoggerType.TENSORBOARD]
    assert filter_trackers(None) == []
    with pytest.raises(ValueError, match="is not a tracker"):
        filter_trackers(["no such"], tmp_path)
    with pytest.raises(ValueError, match="requires a `logging_dir`"):
        filter_trackers(["tensorboard"])


def test_unknown_tracker_is_named():
    accelerator = Accelerator(cpu=True, log_with=ListTracker())
    accelerator.init_trackers("project")
    with pytest.raises(ValueError, match="running: list"):
        accelerator.get_tracker("wandb")
    accelerator.end_training()


@needs_tensorboard
def test_making_a_tracker_makes_no_state(tmp_path):
    """Scripts make trackers before the Accelerator; the first state is that of the Accelerator."""
    PartialState._reset_state()
    mine = TensorBoardTracker("early", tmp_path)
    assert PartialState._shared_state == {}
    Accelerator(cpu=True, log_with=mine)
    assert PartialState._shared_state != {}


# -- packages -----------------------------------------------------------------------------------------------------------------


@needs_tensorboard
def test_tensorboard(tmp_path):
    """Numbers, texts and groups are in the event files, and settings in hparams.yml."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    config = ProjectConfiguration(project_dir=str(tmp_path), logging_dir=str(tmp_path / "logs"))
    accelerator = Accelerator(cpu=True, log_with="tensorboard", project_config=config)
    assert accelerator.log_with == [LoggerType.TENSORBOARD]
    accelerator.init_trackers("project", {"rate": 0.1, "name": "x"}, {"tensorboard": {"flush_secs": 60}})
    writer = accelerator.get_tracker("tensorboard", unwrap=True)
    accelerator.log({"loss": 1.5, "note": "words", "group": {"a": 1.0, "b": 2.0}}, step=4)
    accelerator.end_training()
    assert type(writer).__name__ == "SummaryWriter"
    assert accelerator.get_tracker("tensorboard", unwrap=True) is writer  # scripts read its folder after the end
    events = EventAccumulator(str(tmp_path / "logs" / "project")).Reload()
    assert [(entry.step, entry.value) for entry in events.Scalars("loss")] == [(4, 1.5)]
    assert "note/text_summary" in events.Tags()["tensors"]
    assert list((tmp_path / "logs" / "project").rglob("hparams.yml"))


SCRIPT = """
import json, os, sys
from accelerate import Accelerator

accelerator = Accelerator(cpu=True, log_with=sys.argv[1], project_dir=os.getcwd())
accelerator.init_trackers("project", {"rate": 0.1}, {"wandb": {"mode": "offline", "dir": os.getcwd(), "name": "tiny"}})
for step in range(3):
    accelerator.log({"loss": 1.0 / (step + 1)}, step=step)
tracker = accelerator.get_tracker("wandb")
run = accelerator.get_tracker("wandb", unwrap=True)
told = [type(tracker).__name__, tracker.main_process_only if accelerator.is_main_process else None]
if accelerator.is_main_process:
    told += [run.name, run.project, run.config["rate"]]
accelerator.end_training()
print("TOLD " + json.dumps([accelerator.process_index, told]), flush=True)
"""


@pytest.mark.launched
@pytest.mark.skipif(importlib.util.find_spec("wandb") is None, reason="needs the package wandb")
def test_wandb_offline_on_two_processes(launch, tmp_path):
    """The main process has the run, the other one an object that takes every call."""
    output = launch(SCRIPT, 2, "wandb", environ={"WANDB_MODE": "offline", "WANDB_SILENT": "true"})
    told = dict(json.loads(line.partition("TOLD ")[2]) for line in output.splitlines() if "TOLD " in line)
    assert told[0] == ["WandBTracker", False, "tiny", "project", 0.1]
    assert told[1][0] == "NullTracker"
    assert list(tmp_path.rglob("run-*.wandb"))


def test_no_tracker_at_all():
    """Without `log_with`, the methods do nothing but what concerns Slipstream's own record."""
    accelerator = Accelerator(cpu=True)
    assert accelerator.log_with == []
    accelerator.init_trackers("project", {"rate": 0.1})
    accelerator.log({"loss": 1.0})
    assert accelerator.trackers == []
    with pytest.warns(UserWarning, match="get_tracker.'wandb'.: no tracker runs"):
        nothing = accelerator.get_tracker("wandb")
    nothing.log({"loss": 1.0})
    accelerator.end_training()
