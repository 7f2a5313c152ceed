"""Nothing in a folder of torch.distributed.checkpoint that somebody else made is run, followed or believed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import hostile_dcp
import pytest
from hostile_dcp import CASES


@pytest.fixture(scope="module")
def read(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """All attacks, built here, and read by one process under watch."""
    root = tmp_path_factory.mktemp("hostile")
    hostile_dcp.build(root)
    done = subprocess.run([sys.executable, hostile_dcp.__file__, str(root)], capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return root, json.loads(done.stdout)


def test_every_attack_is_refused(read: tuple[Path, dict[str, Any]]) -> None:
    """Every attack ends in a CheckpointError."""
    _, results = read
    assert [(name, results[name]["ended"], results[name]["said"][:300]) for name in CASES if results[name]["ended"] != "refused"] == []


def test_messages_name_the_folder(read: tuple[Path, dict[str, Any]]) -> None:
    """Messages name the file or folder, and are short."""
    root, results = read
    said = {name: results[name]["said"] for name in CASES}
    assert [said[name] for place, name in enumerate(CASES) if str(root / str(place)) not in said[name] or len(said[name]) > 1000] == []


def test_no_attack_makes_interpreter_do_anything(read: tuple[Path, dict[str, Any]]) -> None:
    """No file outside of the folder is opened, nothing is imported, no process is started, and no mark is left."""
    root, results = read
    assert [(name, results[name]["heard"]) for name in CASES if results[name]["heard"]] == []
    assert list(root.glob("marker-*")) == []
