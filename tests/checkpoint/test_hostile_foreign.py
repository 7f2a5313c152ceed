"""Nothing in a folder that somebody else made is run, followed or believed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import hostile_foreign
import pytest
from hostile_foreign import CASES


@pytest.fixture(scope="module")
def read(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """All attacks, built here, and read by one process under watch."""
    root = tmp_path_factory.mktemp("hostile")
    hostile_foreign.build(root)
    done = subprocess.run([sys.executable, hostile_foreign.__file__, str(root)], capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return root, json.loads(done.stdout)


def test_every_attack_ends_as_to(read: tuple[Path, dict[str, Any]]) -> None:
    """Refused; or, for a part that a run can do without, left out and said."""
    _, results = read
    assert {name: result["ended"] for name, result in results["cases"].items()} == {name: entry.ends for name, entry in CASES.items()}


def test_messages_name_file(read: tuple[Path, dict[str, Any]]) -> None:
    """Messages name the file."""
    root, results = read
    said = {name: result["said"] for name, result in results["cases"].items()}
    paths = {name: f"{root / str(place)}/{case.names}" for place, (name, case) in enumerate(CASES.items())}
    assert [(name, said[name]) for name in CASES if paths[name] not in said[name] or len(said[name]) > 3000] == []


def test_no_attack_makes_interpreter_do_anything(read: tuple[Path, dict[str, Any]]) -> None:
    """No file outside of the folder is opened, nothing is imported, no process is started: the reader reads, and that is all."""
    _, results = read
    assert [(name, result["heard"]) for name, result in results["cases"].items() if result["heard"]] == []


def test_no_attack_leaves_mark(read: tuple[Path, dict[str, Any]]) -> None:
    """No attack leaves its mark."""
    root, _ = read
    assert [name for place, name in enumerate(CASES) if (root / f"marker-{place}").exists()] == []


def test_watch_hears_what_pickle_does(read: tuple[Path, dict[str, Any]]) -> None:
    """The watch hears what a pickle does."""
    root, results = read
    assert (root / "marker-control").exists()
    assert any("os.mkdir" in event for event in results["control"])
    assert any("pickle.find_class" in event for event in results["control"])


def test_attacks_of_every_kind() -> None:
    """There are attacks of every kind."""
    assert len(CASES) > 200
