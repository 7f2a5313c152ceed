"""Every tracker's own package, in its local or offline mode: what was logged is in what it wrote, at the steps that were said."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from slipstream.devices.packages import installed

CHILD = Path(__file__).with_name("real_trackers.py")
TOGETHER = [("mlflow", "trackio", "swanlab"), ("comet_ml",), ("clearml",), ("dvclive",), ("aim",)]
"""Packages that leave one another alone share a process; Comet and ClearML change what others do."""
TOO_HEAVY = {
    "dvclive": "brings all of DVC: a hundred megabytes, and older versions of what others need",
    "aim": "brings a server and its pages: a quarter of a gigabyte",
}
KEEP_TABLES = {"mlflow", "trackio", "comet_ml", "clearml"}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Any]:
    """What a package kept of the run of `real_trackers.py`."""
    kept: dict[str, Any] = {}

    def find(name: str) -> Any:
        if name not in kept:
            names = next(several for several in TOGETHER if name in several)
            names = tuple(name for name in names if installed(name))
            folder = tmp_path_factory.mktemp("trackers")
            done = subprocess.run(
                [sys.executable, str(CHILD), str(folder), *names], capture_output=True, text=True, timeout=110, check=False, cwd=folder
            )
            lines = [line for line in done.stdout.splitlines() if line.startswith("FOUND ")]
            assert lines, f"exit {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
            kept.update(json.loads(lines[-1].removeprefix("FOUND ")))
        return kept[name]

    return find


@pytest.mark.parametrize("name", [name for several in TOGETHER for name in several])
def test_package_keeps_values(name: str, written: Callable[[str], Any]) -> None:
    """A package keeps values at their steps settings pictures and tables."""
    if name in TOO_HEAVY and not installed(name):
        pytest.skip(f"{name} is not among the development packages: it {TOO_HEAVY[name]}")
    assert installed(name), f"{name} is among the development packages: pip install -e .[dev]"
    found = written(name)
    assert "failed" not in found, found["failed"]
    assert found["loss"] == [[3, 1.5], [7, 1.25]]
    assert found["accuracy"] == [[3, 0.5]]
    assert [str(entry) for entry in found["settings"]] == ["0.1", "[1, 2]"]
    assert found["pictures"] == 2
    assert found["tables"] == (1 if name in KEEP_TABLES else None)
    refused, *more = found["said"]
    assert refused.startswith(f"weights is a Tensor of (3,), and the tracker {name} stores numbers")
    assert more == ([] if name in KEEP_TABLES else [f"the tracker {name} does not store tables: log_table() skips it"])
