"""`docs/architecture.md` is true: each path of the page is followed at run time and compared with the files that were entered."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import slipstream
from slipstream import Accelerator, init_empty_weights, load_checkpoint_and_dispatch

PACKAGE = f"{Path(slipstream.__file__).parent}/"
PAGE = (Path(__file__).parent.parent / "docs" / "architecture.md").read_text()
LIMITS = {
    "prepare": 9,
    "step": 9,
    "gather_for_metrics": 7,
    "save_state": 8,
    "load_state": 8,
    "launch": 9,
    "load_checkpoint_and_dispatch": 9,
    "forward of an offloaded model": 4,
}
"""How many files a path may have."""


def path_on_page(name: str) -> tuple[list[str], set[str]]:
    """The files of a path in order, and the rooms that they ask."""
    section = re.search(rf"^### {re.escape(name)}\n(.*?)(?=^#|\Z)", PAGE, re.M | re.S)
    assert section is not None, f"docs/architecture.md has no section {name}"
    files = re.findall(r"^\d+\. `([^`]+)`", section[1], re.M)
    asked = re.search(r"^Asks: (.*)$", section[1], re.M)
    return files, set(re.findall(r"`([^`]+)`", asked[1])) if asked else set()


def imports(frame: FrameType | None) -> bool:
    """Whether a module of the package is being imported: what runs then is no part of a path."""
    while frame is not None:
        if frame.f_code.co_name == "<module>" and frame.f_code.co_filename.startswith(PACKAGE):
            return True
        frame = frame.f_back
    return False


@contextmanager
def followed() -> Iterator[list[str]]:
    """Collects the files of the package whose functions are called, in the order of the first call."""
    files: list[str] = []

    def hook(frame: FrameType, event: str, argument: Any) -> None:
        name = frame.f_code.co_filename
        if event == "call" and name.startswith(PACKAGE) and name.removeprefix(PACKAGE) not in files and not imports(frame):
            files.append(name.removeprefix(PACKAGE))

    before = sys.getprofile()
    sys.setprofile(hook)
    try:
        yield files
    finally:
        sys.setprofile(before)


def compare(name: str, entered: list[str]) -> None:
    """Raise unless the page lists the path: its files in the order in which they are entered, and the rooms of the others."""
    files, rooms = path_on_page(name)
    assert [file for file in entered if file in files] == files, f"{name} enters its files in another order than the page says"
    # The stand-in accelerator is asked where another test of this process has loaded it.
    others = {file.split("/")[0] + "/" if "/" in file else file for file in entered if file not in files} - {"testing/"}
    assert others == rooms, f"{name} asks other rooms than the page says: {sorted(others)}"


def objects() -> tuple[torch.nn.Module, torch.optim.Optimizer, DataLoader[Any]]:
    model = torch.nn.Linear(2, 1)
    return model, torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(TensorDataset(torch.ones(8, 2)), batch_size=4)


class Run:
    """An Accelerator with a model, an optimizer and a loader, in the middle of an epoch."""

    def __init__(self) -> None:
        self.accelerator = Accelerator(cpu=True)
        self.model, self.optimizer, self.loader = self.accelerator.prepare(*objects())
        self.batches = iter(self.loader)
        self.step()

    def step(self) -> None:
        (inputs,) = next(self.batches)
        with self.accelerator.accumulate(self.model):
            self.accelerator.backward(self.model(inputs).mean())
            self.accelerator.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            self.optimizer.zero_grad()


def follow_prepare(folder: Path) -> list[str]:
    accelerator = Accelerator(cpu=True)
    given = objects()
    with followed() as files:
        accelerator.prepare(*given)
    return files


def follow_step(folder: Path) -> list[str]:
    run = Run()
    with followed() as files:
        run.step()
    return files


def follow_metrics() -> list[str]:
    run = Run()
    with followed() as files:
        run.accelerator.gather_for_metrics(torch.ones(2))
    return files


def follow_save(folder: Path) -> list[str]:
    run = Run()
    with followed() as files:
        run.accelerator.save_state(folder / "first")
    return files


def follow_load(folder: Path) -> list[str]:
    run = Run()
    run.accelerator.save_state(folder / "first")
    with followed() as files:
        run.accelerator.load_state(folder / "first")
    return files


def saved_network(folder: Path) -> torch.nn.Module:
    def network() -> torch.nn.Module:
        return torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))

    Accelerator(cpu=True).save_model(network(), folder / "weights")
    with init_empty_weights():
        return network()


def follow_dispatch(folder: Path) -> list[str]:
    model = saved_network(folder)
    with followed() as files:
        load_checkpoint_and_dispatch(model, folder / "weights", device_map={"0": "cpu", "1": "disk"}, offload_folder=folder / "offload")
    return files


def follow_forward(folder: Path) -> list[str]:
    places = {"0": "cpu", "1": "disk"}
    model = load_checkpoint_and_dispatch(saved_network(folder), folder / "weights", device_map=places, offload_folder=folder / "offload")
    model(torch.ones(1, 2))
    with followed() as files:
        model(torch.ones(1, 2))
    return files


LAUNCHED = """
import os, sys, threading
sys.path.insert(0, {tests!r})
from test_architecture import PACKAGE, imports
from slipstream.cli.main import main
seen, out = set(), os.open({log!r}, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
def hook(frame, event, argument):
    name = frame.f_code.co_filename
    if event == "call" and name.startswith(PACKAGE) and (os.getpid(), name) not in seen and not imports(frame):
        seen.add((os.getpid(), name))
        os.write(out, f"{{os.getpid()}} {{name.removeprefix(PACKAGE)}}\\n".encode())
threading.setprofile(hook)
sys.setprofile(hook)
sys.exit(main(["launch", "--cpu", "--num_processes", "2", {script!r}]))
"""


def follow_launch(folder: Path) -> list[str]:
    """Of all processes: those that are forked keep the hook, and append to the same file. What workers enter comes last."""
    script, log = folder / "script.py", folder / "log"
    script.write_text("print('hello')\n")
    program = LAUNCHED.format(log=str(log), tests=str(Path(__file__).parent), script=str(script))
    subprocess.run([sys.executable, "-c", program], check=True, timeout=100, capture_output=True)
    entered = [line.split() for line in log.read_text().splitlines()]
    workers = [file for process, file in entered if process != entered[0][0]]
    return list(dict.fromkeys([file for process, file in entered if process == entered[0][0] and file not in workers] + workers))


FOLLOW: dict[str, Callable[[Path], list[str]]] = {
    "prepare": follow_prepare,
    "step": follow_step,
    "save_state": follow_save,
    "load_state": follow_load,
    "launch": follow_launch,
    "load_checkpoint_and_dispatch": follow_dispatch,
    "forward of an offloaded model": follow_forward,
}


@pytest.mark.parametrize("name", FOLLOW)
def test_paths(name: str, tmp_path: Path) -> None:
    """A path of the page is the one that the call takes."""
    compare(name, FOLLOW[name](tmp_path))


def test_metrics_path(ranks: Any) -> None:
    """Gathering on two processes takes the path of the page, on both."""
    for entered in ranks(2).run(follow_metrics):
        compare("gather_for_metrics", entered)


@pytest.mark.parametrize("name", LIMITS)
def test_lengths(name: str) -> None:
    """No path is longer than its limit, and none returns to a room that it has left."""
    files, _ = path_on_page(name)
    assert 0 < len(files) <= LIMITS[name]
    rooms = [file.split("/")[0] for file in files]
    changes = [room for place, room in enumerate(rooms) if place == 0 or rooms[place - 1] != room]
    assert len(changes) == len(set(changes)), f"{name} returns to a room that it has left: {changes}"
