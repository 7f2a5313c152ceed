"""A run of an Accelerator with a project_dir has a folder: settings with origins, metrics, ledger, events, and a report at the end."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from slipstream import Accelerator
from slipstream.errors import ConfigError, StateError
from slipstream.logging import get_logger
from slipstream.observability.options import LedgerKwargs
from slipstream.observability.run_dir.folder import RunFolder, find_runs
from slipstream.observability.run_dir.reader import Run


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def train(accelerator: Accelerator, steps: int = 4, load: Path | None = None) -> None:
    net = torch.nn.Linear(3, 1)
    data = DataLoader(TensorDataset(torch.randn(2 * steps * accelerator.num_processes, 3)), batch_size=2)
    net, optimizer, data = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1), data)
    if load is not None:
        accelerator.load_state(load)
    for step, (rows,) in enumerate(data):
        loss = net(rows).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        accelerator.log({"loss": loss.item()}, step=step)


def test_run_folder_complete(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A run with a project dir keeps everything in its folder."""
    accelerator = Accelerator(cpu=True, project_dir=tmp_path, gradient_accumulation_steps=1, effective_batch_size=2)
    accelerator.init_trackers("demo", {"lr": 0.1, "api_key": "hunter2", "sizes": torch.arange(3)}, {"local": {"name": "first"}})
    assert accelerator.log_with == []
    assert accelerator.run_dir == tmp_path / "runs" / "first"
    train(accelerator)
    get_logger("mine").warning("%s is small, password=hunter2", "the batch")
    accelerator.save_state(tmp_path / "saved")
    accelerator.load_state(tmp_path / "saved")
    accelerator.end_training()
    assert accelerator.run_dir is None
    folder = tmp_path / "runs" / "first"
    assert {path.name for path in folder.iterdir()} >= {
        "run.json", "config.json", "environment.json", "metrics.jsonl", "ledger.jsonl", "events.jsonl", "report.html",
    }  # fmt: skip
    assert b"hunter2" not in b"".join(path.read_bytes() for path in folder.iterdir() if path.is_file())
    config = json.loads((folder / "config.json").read_text())
    assert config["settings"] == {"lr": 0.1, "api_key": "[redacted]", "sizes": [0, 1, 2]}
    assert config["options"]["cpu"] == {"value": True, "origin": "from AcceleratorState(cpu=...)"}
    assert config["options"]["effective_batch_size"]["origin"] == "from Accelerator(effective_batch_size=...)"
    assert config["options"]["mixed_precision"]["origin"] == "by default"
    assert [event["kind"] for event in lines(folder / "events.jsonl")] == ["start", "warning", "checkpoint", "restore", "end"]
    assert lines(folder / "events.jsonl")[1]["text"] == "the batch is small, password=[redacted]"
    intervals = lines(folder / "ledger.jsonl")
    assert [interval["steps"] for interval in intervals] == [4, 0], "what comes after the last step has an interval too"
    assert intervals[1]["phases"]["checkpoint"][0] > 0
    run = Run(folder)
    run.refresh()
    assert list(run.series["loss"].steps) == [0.0, 1.0, 2.0, 3.0]
    assert run.info["state"] == "finished"
    assert capsys.readouterr().err.splitlines()[-1] == f"report: {folder / 'report.html'}"
    assert "<title>" in (folder / "report.html").read_text()


def test_resumed_step_numbers(tmp_path: Path) -> None:
    """The steps of a run that goes on go on."""
    for begin in (0, 4):
        accelerator = Accelerator(cpu=True, project_dir=tmp_path, kwargs_handlers=[LedgerKwargs(summary=False)])
        accelerator.init_trackers("demo", init_kwargs={"local": {"name": "again", "resume": begin > 0}})
        train(accelerator, load=tmp_path / "saved" if begin else None)
        accelerator.save_state(tmp_path / "saved")
        accelerator.end_training()
    folder = tmp_path / "runs" / "again"
    assert [(line["first"], line["last"]) for line in lines(folder / "ledger.jsonl") if line["steps"]] == [(0, 3), (4, 7)]
    assert [line["step"] for line in lines(folder / "events.jsonl") if line["kind"] in ("checkpoint", "restore")] == [4, 4, 8]


def test_unnamed_run(tmp_path: Path) -> None:
    """A script that names no run has a folder all the same."""
    accelerator = Accelerator(cpu=True, project_dir=tmp_path, kwargs_handlers=[LedgerKwargs(summary=False)])
    train(accelerator)
    accelerator.end_training()
    (folder,) = find_runs(tmp_path)
    assert sum(interval["steps"] for interval in lines(folder / "ledger.jsonl")) == 4


def test_without_project_dir(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a project dir nothing is written and without steps nothing is said."""
    monkeypatch.chdir(tmp_path)
    accelerator = Accelerator(cpu=True)
    accelerator.init_trackers("demo")
    accelerator.end_training()
    assert not list(tmp_path.iterdir())
    assert capsys.readouterr().err == ""
    accelerator = Accelerator(cpu=True, project_dir=tmp_path / "unused")
    accelerator.end_training()
    assert not list(tmp_path.iterdir()), "a project_dir alone is no run"


def test_same_name_and_resume(tmp_path: Path) -> None:
    """Two runs with one name are refused and the second can go on."""
    for keywords in ({"name": "first"}, {"name": "first", "resume": True}):
        accelerator = Accelerator(cpu=True, project_dir=tmp_path)
        if "resume" in keywords:
            with pytest.raises(ConfigError, match=r"a run named 'first' exists .* resume=True"):
                accelerator.init_trackers("demo", init_kwargs={"local": {"name": "first"}})
        accelerator.init_trackers("demo", init_kwargs={"local": keywords})
        accelerator.log({"loss": 1.0}, step=0)
        accelerator.end_training()
    run = Run(tmp_path / "runs" / "first")
    run.refresh()
    assert len(run.info["attempts"]) == 2


def test_project_dir_url(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A project dir that is not a folder does not stop a run."""
    accelerator = Accelerator(cpu=True, project_dir="memory://somewhere", kwargs_handlers=[LedgerKwargs(summary=False)])
    accelerator.init_trackers("demo")
    train(accelerator)
    accelerator.end_training()
    assert "is not a local folder: this run has no run directory" in caplog.text


def test_chdir_and_file_url(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A folder is where it was whatever the script does and a URL of a file is one."""
    (tmp_path / "elsewhere").mkdir()
    for place in ("relative", f"file://{tmp_path}/by%20url"):
        monkeypatch.chdir(tmp_path)
        accelerator = Accelerator(cpu=True, project_dir=place, log_with=["local", "tensorboard"])
        accelerator.init_trackers("demo")
        monkeypatch.chdir(tmp_path / "elsewhere")
        accelerator.log({"loss": 1.0}, step=0)
        accelerator.end_training()
        (folder,) = find_runs(tmp_path / ("relative" if place == "relative" else "by url"))
        assert (folder / "report.html").exists()
        assert (folder.parent.parent / "demo").is_dir()
    assert not list((tmp_path / "elsewhere").iterdir())
    assert not [message for message in caplog.messages if "could not be" in message or "failed" in message]
    for name in ("local", "tensorboard"):
        with pytest.raises(
            ConfigError, match=rf"tracker {name} writes into a folder of this machine, and 's3://bucket/run' is a URL: .*logging_dir="
        ):
            Accelerator(cpu=True, project_dir="s3://bucket/run", log_with=name)


def test_wrong_arguments(tmp_path: Path) -> None:
    """Arguments that are wrong make no folder and leave a run alone."""
    accelerator = Accelerator(cpu=True, project_dir=tmp_path, kwargs_handlers=[LedgerKwargs(summary=False)])
    for wrong in ((None,), (5,), ("demo", 5), ("demo", None, 5), ("demo", None, {"local": 5}), ("demo", None, {"local": {"foo": 1}})):
        with pytest.raises(ConfigError):
            accelerator.init_trackers(*wrong)
    assert not list(tmp_path.iterdir())
    accelerator.init_trackers("demo", init_kwargs={"local": {"name": "first"}})
    folder = tmp_path / "runs" / "first"
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises(StateError, match="run already"):
        accelerator.init_trackers("demo")
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert accelerator.run_dir == folder
    accelerator.end_training()
    assert [event["kind"] for event in lines(folder / "events.jsonl")] == ["start", "end"]


def test_full_disk(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A full disk is said once and the training goes on."""
    accelerator = Accelerator(cpu=True, project_dir=tmp_path, kwargs_handlers=[LedgerKwargs(summary=False)])
    accelerator.init_trackers("demo")
    folder = accelerator._recorder.folder
    assert folder is not None
    accelerator._recorder._put = _no_space  # type: ignore[method-assign]
    for _ in range(3):
        accelerator._recorder.event({"kind": "checkpoint"})
    accelerator.end_training()
    assert caplog.text.count("No space left") == 1


@pytest.mark.parametrize("resume", [False, True], ids=["new run", "resumed run"])
def test_full_disk_at_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, resume: bool) -> None:
    """A run that starts on a full disk trains, and is recorded from the moment on that there is space."""
    local = {"local": {"name": "first", "resume": resume}}
    for full in (False, True) if resume else (True,):
        with monkeypatch.context() as disk:
            if full:
                disk.setattr("os.write", _no_space)
                disk.setattr(RunFolder, "write_json", _no_space)
            accelerator = Accelerator(cpu=True, project_dir=tmp_path, kwargs_handlers=[LedgerKwargs(summary=False)])
            accelerator.init_trackers("demo", {"lr": 0.1}, local)
            train(accelerator, steps=2)
        train(accelerator, steps=2)
        accelerator.save_state(tmp_path / "saved")
        accelerator.end_training()
    assert caplog.text.count("the folder of the run could not be written") == 1
    found = Run(tmp_path / "runs" / "first")
    found.refresh()
    assert len(found.info["attempts"]) == 1 + resume
    written = [json.loads(line) for line in (tmp_path / "runs" / "first" / "metrics.jsonl").read_text().splitlines() if line]
    assert [line["config"] for line in written if "config" in line] == [{"lr": 0.1}] * (1 + resume)
    assert [line["step"] for line in written if "values" in line] == [0, 1] * (3 if resume else 1)


@pytest.mark.parametrize("left", [[], ["metrics.jsonl", ".run.writing-17.json"]])
def test_run_that_never_began_is_resumed(tmp_path: Path, left: list[str]) -> None:
    """A folder that was claimed by a process which was killed before run.json was there does not keep the job from starting again."""
    folder = tmp_path / "runs" / "first"
    folder.mkdir(parents=True)
    for name in left:
        (folder / name).touch()
    with pytest.raises(ConfigError, match="not a run"):
        RunFolder.create(tmp_path, "first", project="demo")
    assert RunFolder.create(tmp_path, "first", project="demo", resume=True).path == folder
    (folder / "run.json").unlink()
    (folder / "thesis.tex").touch()
    with pytest.raises(ConfigError, match="not a run"):
        RunFolder.create(tmp_path, "first", project="demo", resume=True)


def _no_space(*arguments: Any) -> None:
    raise OSError(28, "No space left on device")


def test_main_process_writes(ranks: Any, tmp_path: Path) -> None:
    """Only the main process writes and tells of all."""
    def run() -> Any:
        accelerator = Accelerator(project_dir=tmp_path, kwargs_handlers=[LedgerKwargs(summary=False)])
        accelerator.init_trackers("demo", {"lr": 0.1}, {"local": {"name": "two"}})
        train(accelerator)
        folder = accelerator.run_dir
        accelerator.end_training()
        return folder is not None

    assert ranks(2).run(run) == [True, False]
    intervals = lines(tmp_path / "runs" / "two" / "ledger.jsonl")
    assert all(len(interval["phases"]["forward"]) == 2 for interval in intervals)
    assert all(spent is not None for interval in intervals for spent in interval["phases"]["forward"])
    assert len(list((tmp_path / "runs").iterdir())) == 1


SCRIPT = """
import sys
import torch
from slipstream import Accelerator
accelerator = Accelerator(cpu=True, project_dir=sys.argv[1])
accelerator.init_trackers("demo", init_kwargs={"local": {"name": sys.argv[2]}})
model = accelerator.prepare(torch.nn.Linear(1, 1))
optimizer = accelerator.prepare(torch.optim.SGD(model.parameters()))
for _ in range(3):
    accelerator.backward(model(torch.ones(1)).sum())
    optimizer.step()
if sys.argv[2] == "broken":
    raise RuntimeError("on purpose")
"""


def test_exit_without_end_training(tmp_path: Path) -> None:
    """A script that ends without end training says how."""
    for name, state, why in (
        ("broken", "failed", "RuntimeError: on purpose"),
        ("whole", "ended", "the script ended without end_training()"),
    ):
        subprocess.run([sys.executable, "-c", SCRIPT, str(tmp_path), name], capture_output=True, timeout=100, check=False)
        folder = tmp_path / "runs" / name
        assert json.loads((folder / "run.json").read_text())["state"] == state
        assert lines(folder / "events.jsonl")[-1]["text"] == why
        assert sum(interval["steps"] for interval in lines(folder / "ledger.jsonl")) == 3
        assert (folder / "report.html").exists()


FORKS = """
import os, sys
from slipstream import Accelerator
accelerator = Accelerator(cpu=True, project_dir=sys.argv[1])
accelerator.init_trackers("project", init_kwargs={"local": {"name": "run"}})
if not os.fork():
    sys.exit(0)
os.wait()
print(open(accelerator.run_dir / "run.json").read())
"""


def test_child_that_exits(tmp_path: Path) -> None:
    """A child process that ends, with what it has inherited, does not end the run of its parent."""
    done = subprocess.run([sys.executable, "-c", FORKS, str(tmp_path)], capture_output=True, text=True, timeout=90)
    assert json.loads(done.stdout)["state"] == "running", done.stderr
    assert json.loads((tmp_path / "runs" / "run" / "run.json").read_text())["state"] == "ended"


PLAIN_STEP = """
import sys, torch
from torch.utils.data import DataLoader
from slipstream import Accelerator
from slipstream.utils import LedgerKwargs
accelerator = Accelerator(cpu=True, kwargs_handlers=[LedgerKwargs(interval=3600.0)])
net = torch.nn.Linear(2, 1)
net, optimizer, loader = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1), DataLoader(torch.ones(4, 2), batch_size=2))
for batch in loader:
    accelerator.backward(net(batch).mean())
    optimizer.step()
    optimizer.zero_grad()
print(*sorted(name for name in sys.modules if name.startswith("slipstream.observability")))
"""


def test_modules_of_plain_step() -> None:
    """A step without project_dir and trackers imports at most twelve modules of observability: no tracker, no report, no guard's check."""
    done = subprocess.run([sys.executable, "-c", PLAIN_STEP], capture_output=True, text=True, timeout=110, check=True)
    modules = done.stdout.split()
    assert len(modules) <= 12, modules
    unused = ("trackers", "run_dir", "report", "profiler", "guards.loss_spikes", "guards.non_finite", "guards.replicas")
    assert not [name for name in modules if name.removeprefix("slipstream.observability.").startswith(unused)]
