"""A training step on a CUDA device that is not there: everything is placed on the device, nothing mixes devices, nothing waits for it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

HERE = Path(__file__).parent
DEVICE = ["cuda:0"]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What each scenario of `fake_cuda_steps.py` found, in a process of its own."""
    if torch.version.cuda is not None:
        pytest.skip("this build of torch has CUDA, and no place for a device that is not there")
    compiler = shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        (pytest.fail if os.environ.get("CI") else pytest.skip)("no C++ compiler: autograd cannot be told of a device that is not there")
    library, root = tmp_path_factory.mktemp("absent_cuda") / "absent_cuda.so", Path(torch.__file__).parent
    folders = [f"-I{root / 'include'}", f"-L{root / 'lib'}", f"-Wl,-rpath,{root / 'lib'}"]
    build = [compiler, "-shared", "-fPIC", "-std=c++20", "-O0", *folders, str(HERE / "absent_cuda.cpp"), "-lc10", "-ltorch_cpu"]
    subprocess.run([*build, "-o", str(library)], check=True, timeout=100)
    program = [sys.executable, str(HERE / "fake_cuda_steps.py"), str(library)]
    done = subprocess.run(program, capture_output=True, text=True, timeout=100, cwd=library.parent, check=False)
    lines = [line.removeprefix("FOUND ") for line in done.stdout.splitlines() if line.startswith("FOUND ")]
    assert lines, done.stderr
    results: dict[str, dict[str, Any]] = json.loads(lines[0])
    return results


PRECISIONS = {"no": "torch.float32", "bf16": "torch.bfloat16", "fp16": "torch.float16"}


@pytest.mark.parametrize("scenario", ["no", "bf16", "fp16", "stream", "dispatch", "guarded"])
def test_step_stays_on_device(found: dict[str, Any], scenario: str) -> None:
    """Parameters, buffers, batches, gradients, their norm, optimizer states and gathered outputs are on the device."""
    facts = found[scenario]
    assert "error" not in facts, facts["error"]
    assert facts["device"] == DEVICE[0]
    for what in ("parameters", "buffers", "batch", "gradients", "norm", "state", "gathered"):
        assert facts[what] == DEVICE, what
    assert facts["computed"] == [PRECISIONS.get(scenario, "torch.float32")]
    assert facts["output"] == "torch.float32"


@pytest.mark.parametrize(("scenario", "waits"), [("no", 0), ("bf16", 0), ("stream", 0), ("dispatch", 0), ("fp16", 2), ("guarded", 2)])
def test_host_does_not_wait(found: dict[str, Any], scenario: str, waits: int) -> None:
    """No value is read from the device in a step. Loss scaling, and `on_nan="raise"` with clipping, read one for each update."""
    reads = found[scenario]["reads"]
    assert len(reads) == waits, reads


def test_collectives_stay_on_device(found: dict[str, Any]) -> None:
    """What one process gathers, reduces, pads and sends is on its device."""
    assert found["collectives"] == dict.fromkeys(("gather", "reduce", "pad", "nested", "sent"), DEVICE)


def test_replica_in_fake_group(found: dict[str, Any]) -> None:
    """A replica in a group of two sends its gradients from the device, and has them there."""
    assert found["replicas"] == {"sent": DEVICE, "gradients": DEVICE}


def test_model_over_two_devices(found: dict[str, Any]) -> None:
    """The inputs of a dispatched model follow its weights, and its output returns to where the input was."""
    assert found["two devices"] == {"weights": ["cuda:0", "cuda:1", "cuda:0"], "output": "cpu"}


@pytest.mark.parametrize(("mistake", "devices"), [
    ("target on the host", ("cuda:0", "cpu")),
    ("input on the host", ("cuda:0", "cpu")),
    ("optimizer state on the host", ("cuda:0", "cpu")),
    ("target on the other device", ("cuda:0", "cuda:1")),
    ("batches not moved", ("cuda:0", "cpu")),
    ("model not moved", ("cuda:0", "cpu")),
])
def test_mistake_is_noticed(found: dict[str, Any], mistake: str, devices: tuple[str, str]) -> None:
    """A tensor that is planted in the wrong place is an error that names both devices."""
    error = found[f"mistake: {mistake}"].get("error", "none")
    assert "all tensors to be on the same device" in error
    assert all(device in error for device in devices)


def test_read_is_noticed(found: dict[str, Any]) -> None:
    """A loss that is read in every step is counted four times, with the function that read it."""
    reads = found["mistake: loss read"]["reads"]
    assert [read.partition(" ")[0] for read in reads] == ["read_each_step"] * 4
