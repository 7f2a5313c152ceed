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

FOLDER = Path(__file__).parent
SCRIPTS = sorted(path.stem for path in (FOLDER / "scripts").glob("ddp_*.py"))
BY_TORCHRUN = [
    "ddp_environment", "ddp_flat_accumulation", "ddp_local_rank_argument", "ddp_metrics", "ddp_no_sync", "ddp_trainer_class",
]
BY_THEMSELVES = ["ddp_checkpoint", "ddp_spawn"]
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


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}


def run(*command: str) -> subprocess.Popen[str]:
    return subprocess.Popen(command, env=environment(), text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def finish(*processes: subprocess.Popen[str]) -> list[str]:
    outputs = [process.communicate(timeout=100)[0] for process in processes]
    for process, output in zip(processes, outputs, strict=True):
        assert process.returncode == 0, output
    return outputs


def printed(folder: Path, names: list[str]) -> dict[str, list[str]]:
    return {name: [line for line in (folder / f"{name}.0.txt").read_text().splitlines() if "Running" not in line] for name in names}


@pytest.mark.launched
def test_same_weights(tmp_path: Path) -> None:
    """Migrated scripts train the weights of the originals on two processes; on one, too, if their global batch is the same there."""
    folders = {name: tmp_path / name for name in ("new", "before", "two", "one")}
    for folder in folders.values():
        folder.mkdir()
    for name in BY_TORCHRUN + BY_THEMSELVES:
        (folders["new"] / f"{name}.py").write_text(migrated(name))
    driver = str(FOLDER / "run_scripts.py")
    new = [str(folders["new"] / f"{name}.py") for name in BY_TORCHRUN + BY_THEMSELVES]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", driver, str(folders["before"])]
    launch = [sys.executable, "-m", "slipstream", "launch", "--cpu", "--num_processes"]
    output = ["--output", str(folders["before"] / "checkpoint.pth.tar")]
    own = [run(sys.executable, str(FOLDER / "scripts" / f"{name}.py"), *(output if name == "ddp_spawn" else [])) for name in BY_THEMSELVES]
    outputs = finish(*own)
    finish(run(*torchrun, *(str(FOLDER / "scripts" / f"{name}.py") for name in BY_TORCHRUN)))
    finish(run(*launch, "2", driver, str(folders["two"]), *new))
    finish(run(*launch, "1", driver, str(folders["one"]), *(script for script in new if Path(script).stem in ALIKE_ON_ONE)))
    expected = printed(folders["before"], BY_TORCHRUN)
    for name, text in zip(BY_THEMSELVES, outputs, strict=True):
        expected[name] = [line for line in text.splitlines() if line.startswith(("epoch", "weights"))]
    assert printed(folders["two"], BY_TORCHRUN + BY_THEMSELVES) == expected
    assert printed(folders["one"], ALIKE_ON_ONE) == {name: expected[name] for name in ALIKE_ON_ONE}
    assert all(lines[-1].startswith("weights") for lines in expected.values())
