"""Checkpoints of Accelerate 1.15 are loaded by the drop-in, and those of the drop-in in Accelerate's format by Accelerate 1.15.

One program saves on one package and loads on the other, each in processes of its own. Weights, optimizer, learning rate, random numbers,
registered object and the samples and losses of the batches that follow have to be equal to the last digit. Accelerate is the real package
in a folder of its own: REAL_ACCELERATE names one, or it is installed for these tests.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = [pytest.mark.launched, pytest.mark.timeout(300)]
PROGRAM = Path(__file__).parent / "programs" / "checkpoint_program.py"
CONSTRAINTS = Path(__file__).resolve().parents[3] / "constraints.txt"
OURS, THEIRS = "the drop-in", "Accelerate"


@pytest.fixture(scope="session")
def accelerate_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with the real package."""
    if given := os.environ.get("REAL_ACCELERATE"):
        return given
    folder = str(tmp_path_factory.mktemp("accelerate"))
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "-c", str(CONSTRAINTS)]
    words = [*pip, "--target", folder, "accelerate==1.15.0"]
    ended = subprocess.run(words, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=200)
    if ended.returncode:
        pytest.skip(f"Accelerate 1.15 could not be installed: {ended.stderr.strip()[-300:]}")
    return folder


class Runs:
    """Runs the program on either package."""

    def __init__(self, real: str, folder: Path) -> None:
        self._real, self._folder = real, folder

    def run(self, package: str, action: str, processes: int = 1, environ: dict[str, str] | None = None, **spec: Any) -> list[Any]:
        report = self._folder / f"{package.split()[-1]}-{action}"
        spec = {"action": action, "folder": str(self._folder / "checkpoint"), "report": str(report), **spec}
        variables = {"OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true", **(environ or {})}
        if package == THEIRS:
            variables["PYTHONPATH"] = os.pathsep.join(filter(None, [self._real, os.environ.get("PYTHONPATH")]))
        start = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)] if processes > 1 else []
        words = [sys.executable, *start, str(PROGRAM), json.dumps(spec)]
        ended = subprocess.run(
            words, env={**os.environ, **variables}, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=120, cwd=self._folder
        )
        if ended.returncode:
            pytest.fail(f"{action} on {package} failed:\n{ended.stdout}\n{ended.stderr[-8000:]}", pytrace=False)
        return [torch.load(f"{report}-{rank}.pt", weights_only=False) for rank in range(processes)]

    @property
    def files(self) -> set[str]:
        root = self._folder / "checkpoint"
        return {path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file()}


@pytest.fixture
def runs(accelerate_folder: str, tmp_path: Path) -> Runs:
    return Runs(accelerate_folder, tmp_path)


def equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return isinstance(other, dict) and one.keys() == other.keys() and all(equal(value, other[key]) for key, value in one.items())
    if isinstance(one, list):
        return isinstance(other, list) and len(one) == len(other) and all(map(equal, one, other))
    return bool(one == other)


def assert_equal(saved: list[dict[str, Any]], loaded: list[dict[str, Any]], *leave_out: str) -> None:
    for rank, (one, other) in enumerate(zip(saved, loaded, strict=True)):
        for name in one:
            assert name in leave_out or equal(one[name], other[name]), f"{name} on rank {rank}: {one[name]} and {other[name]}"


FSDP = [[1, "SHARDED_STATE_DICT"], [2, "SHARDED_STATE_DICT"], [2, "FULL_STATE_DICT"]]
"""torch crashes on the CPU where FSDP1 puts a full state dict together, so Accelerate cannot be asked for that."""
FORMAT = {"ACCELERATE_CHECKPOINT_FORMAT": "accelerate"}


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("safe", [True, False])
def test_loads_what_accelerate_saved(runs, processes, safe):
    """A folder of Accelerate's `save_state` is loaded, and the run goes on as it would have there."""
    saved = runs.run(THEIRS, "save", processes, safe=safe)
    assert ("model.safetensors" if safe else "pytorch_model.bin") in runs.files
    assert_equal(saved, runs.run(OURS, "load", processes))


@pytest.mark.parametrize("shuffled", [False, True])
@pytest.mark.parametrize(("saver", "loader"), [(THEIRS, OURS), (OURS, THEIRS), (OURS, OURS)])
def test_stateful_loaders_continue_by_themselves(runs, saver, loader, shuffled):
    """With `use_stateful_dataloader` the position is in the checkpoint, and the next sample is the one that would have come."""
    saved = runs.run(saver, "save", 2, FORMAT, stateful=True, shuffled=shuffled)
    assert "dl_state_dict.bin" in runs.files
    assert_equal(saved, runs.run(loader, "load", 2, stateful=True, shuffled=shuffled))


@pytest.mark.parametrize(("saver", "loader"), [(THEIRS, OURS), (OURS, THEIRS), (OURS, OURS)])
def test_shuffled_samples_continue(runs, saver, loader):
    """With a seedable sampler, `skip_first_batches` in the same epoch continues with the same samples on the other package."""
    saved = runs.run(saver, "save", 2, FORMAT, shuffled=True)
    assert_equal(saved, runs.run(loader, "load", 2, shuffled=True))


@pytest.mark.parametrize("kind", FSDP, ids=str)
def test_loads_what_accelerate_saved_under_fsdp(runs, kind):
    """Sharded and full state dicts of FSDP are loaded into sharded models."""
    saved = runs.run(THEIRS, "save", 2, fsdp=kind)
    assert ("optimizer_0/.metadata" in runs.files) is (kind[1] == "SHARDED_STATE_DICT")
    assert_equal(saved, runs.run(OURS, "load", 2, fsdp=[2, kind[1]]), *(["optimizer"] if kind[0] == 1 else []))


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("safe", [True, False])
def test_accelerate_loads_what_was_saved_for_it(runs, processes, safe):
    """With ACCELERATE_CHECKPOINT_FORMAT=accelerate, `save_state` writes the files of Accelerate, and that goes on with them."""
    saved = runs.run(OURS, "save", processes, FORMAT, safe=safe)
    weights = "model.safetensors" if safe else "pytorch_model.bin"
    random_states = {f"random_states_{rank}.pkl" for rank in range(processes)}
    assert runs.files == {weights, "optimizer.bin", "scheduler.bin", "custom_checkpoint_0.pkl", *random_states}
    assert_equal(saved, runs.run(THEIRS, "load", processes))
    assert_equal(saved, runs.run(OURS, "load", processes))


@pytest.mark.parametrize("kind", FSDP, ids=str)
def test_accelerate_loads_what_was_saved_for_it_under_fsdp(runs, kind):
    """With the argument `checkpoint_format="accelerate"`, sharded runs write what Accelerate's FSDP reads.

    Accelerate 1.15 does not restore the state of an optimizer from FSDP1's shards, not even from its own: it starts from zero.
    """
    saved = runs.run(OURS, "save", 2, fsdp=kind, options={"checkpoint_format": "accelerate"})
    assert ("optimizer_0/.metadata" in runs.files) is (kind[1] == "SHARDED_STATE_DICT")
    assert_equal(saved, runs.run(THEIRS, "load", 2, fsdp=kind), *(["optimizer", "losses"] if kind[0] == 1 else []))


def test_own_format_is_without_pickle(runs):
    """Without the switch, the folder has a manifest and no file that pickle wrote; it resumes exactly as well."""
    saved = runs.run(OURS, "save", 2)
    assert "MANIFEST.json" in runs.files
    assert not [name for name in runs.files if not name.endswith((".json", ".safetensors"))]
    assert_equal(saved, runs.run(OURS, "load", 2))


@pytest.mark.parametrize(("saver", "loader"), [(THEIRS, OURS), (OURS, THEIRS)])
@pytest.mark.parametrize("safe", [True, False])
def test_shards_and_scalers_go_both_ways(runs, saver, loader, safe):
    """Shards of `save_model` are read by `load_checkpoint_in_model`, and the state of a loss scaler by the checkpoint functions."""
    saved = runs.run(saver, "save_parts", safe=safe)
    assert len([name for name in runs.files if name.startswith("shards/") and not name.endswith(".json")]) > 1
    assert_equal(saved, runs.run(loader, "load_parts"))
