"""Hand-written DDP scripts become scripts for Slipstream: what changes, and that the result trains the same weights.

The scripts in `scripts/` are written in the style of what is found in the wild. Those that train the same on a CPU run before the change
on two gloo processes, by torchrun or by themselves, and after it by `slipstream launch --cpu` on two processes and on one.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from slipstream.migrate.migration import migrate_text
from slipstream.utils import get_free_port

FOLDER = Path(__file__).parent
SCRIPTS = sorted(path.stem for path in (FOLDER / "scripts").glob("ddp_*.py"))
BY_TORCHRUN = ["ddp_environment", "ddp_flat_accumulation", "ddp_local_rank_argument", "ddp_metrics", "ddp_trainer_class"]
ALIKE_ON_ONE = ["ddp_environment", "ddp_no_sync", "ddp_spawn", "ddp_checkpoint"]
"""Scripts whose global batch does not depend on the number of processes."""

GONE = (
    "init_process_group", "DistributedSampler", "DDP(", "DataParallel(", ".spawn(", "os.environ[", "set_device", ".module", ".cuda(",
)


def original(name: str) -> str:
    return (FOLDER / "scripts" / f"{name}.py").read_text()


def migrated(name: str) -> str:
    return migrate_text(original(name), f"{name}.py").new


@pytest.mark.parametrize("name", SCRIPTS)
def test_nothing_is_left(name: str) -> None:
    """No call of the process group, the wrapper or the sampler is left, and a second migration changes nothing."""
    new = migrated(name)
    assert [gone for gone in GONE if gone in new] == []
    again = migrate_text(new, name)
    assert again.diff() == ""


@pytest.mark.parametrize("name", SCRIPTS)
def test_comments_stay(name: str) -> None:
    """Comments and docstrings of code that stays are those of the original."""
    new = migrated(name)
    assert new.startswith(original(name).splitlines()[0])
    gone = {"# every process joins the group", "# average the gradients in the last micro step only"}
    comments = {line.strip() for line in original(name).splitlines() if line.strip().startswith("#")} - gone
    assert {comment for comment in comments if comment not in new} == set()


def run(*command: str) -> str:
    """Run a command to its end; return what it prints."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(command, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=200)
    assert done.returncode == 0, done.stdout
    return done.stdout


def lines_of(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith(("epoch", "weights"))]


def printed(folder: Path, names: list[str]) -> dict[str, list[str]]:
    return {name: lines_of((folder / f"{name}.0.txt").read_text()) for name in names}


def launch(folder: Path, processes: int, names: list[str]) -> dict[str, list[str]]:
    """Run migrated scripts by `slipstream launch`, all in one start; return what rank 0 prints in each."""
    scripts = [folder / f"{name}.py" for name in names]
    for script in scripts:
        script.write_text(migrated(script.stem))
    start = (sys.executable, "-m", "slipstream", "launch", "--cpu", "--num_processes", str(processes))
    run(*start, str(FOLDER / "run_scripts.py"), str(folder), *map(str, scripts))
    return printed(folder, names)


@pytest.fixture(scope="module")
def by_torchrun(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """What the originals print on two processes of torchrun."""
    folder = tmp_path_factory.mktemp("before")
    start = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2")
    run(*start, str(FOLDER / "run_scripts.py"), "--fork", str(folder), *(str(FOLDER / "scripts" / f"{name}.py") for name in BY_TORCHRUN))
    return printed(folder, BY_TORCHRUN)


@pytest.fixture(scope="module")
def by_spawn(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """What the original prints that starts its processes by itself."""
    output = str(tmp_path_factory.mktemp("spawned") / "checkpoint.pth.tar")
    address = f"tcp://127.0.0.1:{get_free_port()}"
    return {"ddp_spawn": lines_of(run(sys.executable, str(FOLDER / "scripts" / "ddp_spawn.py"), "--output", output, "--dist-url", address))}


@pytest.fixture(scope="module")
def on_two(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """What the migrated scripts print on two processes."""
    return launch(tmp_path_factory.mktemp("after"), 2, [*BY_TORCHRUN, "ddp_no_sync", "ddp_spawn", "ddp_checkpoint"])


@pytest.mark.launched
def test_same_weights_on_one_process(tmp_path: Path, on_two: dict[str, list[str]]) -> None:
    """On one process, too, if the global batch is the same there."""
    assert launch(tmp_path, 1, ALIKE_ON_ONE) == {name: on_two[name] for name in ALIKE_ON_ONE}


@pytest.mark.launched
@pytest.mark.timeout(240)  # torchrun, and a process for each script
def test_same_weights(on_two: dict[str, list[str]], by_torchrun: dict[str, list[str]]) -> None:
    """Scripts for torchrun train the same weights and print the same losses on two processes after the migration."""
    assert all(lines[-1].startswith("weights") for lines in by_torchrun.values())
    assert {name: on_two[name] for name in BY_TORCHRUN} == by_torchrun


@pytest.mark.launched
def test_same_weights_without_spawn(on_two: dict[str, list[str]], by_spawn: dict[str, list[str]]) -> None:
    """A script that started its own processes does the same under `slipstream launch`."""
    assert by_spawn["ddp_spawn"][-1].startswith("weights")
    assert on_two["ddp_spawn"] == by_spawn["ddp_spawn"]
