"""Checkpoints that were tampered with are refused or passed over, without a trace: see `hostile.py` for what is done to them.

All of them are read in one process of its own (`hostile_reader.py`), which watches itself by an audit hook.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hostile
import pytest
from damage import MUTATIONS

import specimens
from slipstream.checkpoint.locate import open_checkpoint, open_newest, read_saved_state
from slipstream.errors import CheckpointError

pytestmark = pytest.mark.timeout(1200)  # for `--soak`

Results = dict[str, dict[str, Any]]
ROOM = 64 << 20
LONGEST = 2.0
SECONDS_PER_BYTE = 40e-9


@pytest.fixture(scope="module")
def watched(request: pytest.FixtureRequest) -> dict[str, Any]:
    """What the other process wrote down."""
    memory = Path("/dev/shm")  # thousands of small files: no disk has to see them
    folder = Path(tempfile.mkdtemp(prefix="hostile-", dir=memory if os.access(memory, os.W_OK) else None))
    extent = "all" if request.config.getoption("--soak") else "some"
    program = Path(__file__).with_name("hostile_reader.py")
    tests = os.pathsep.join([str(program.parent), str(program.parent.parent)])
    try:
        subprocess.run(
            [sys.executable, program, folder, folder / "results.json", extent],
            check=True, timeout=600, capture_output=True, env={**os.environ, "PYTHONPATH": tests, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        found: dict[str, Any] = json.loads((folder / "results.json").read_text())
    finally:
        shutil.rmtree(folder)
    return found


@pytest.fixture(scope="module")
def results(watched: dict[str, Any]) -> Results:
    """What came of every attack, by its name and by who read it."""
    found: Results = watched["attacks"]
    return found


def reads(results: Results, *readers: str) -> Iterator[tuple[str, dict[str, Any], dict[str, Any]]]:
    """Every reading of every attack: a name for messages, the attack, what came of it."""
    for name, attack in results.items():
        for way, outcome in attack.items():
            if "/" in way and (not readers or way.split("/")[1] in readers):
                yield f"{name} ({way})", attack, outcome


def test_many_attacks(results: Results) -> None:
    """There are many attacks."""
    assert len(results) >= 300
    assert sum(attack["refused"] for attack in results.values()) >= 280


def test_no_reader_crashes_or_blocks(results: Results) -> None:
    assert [(name, outcome) for name, _, outcome in reads(results) if "crashed" in outcome or "blocked" in outcome] == []


def test_every_attack_is_refused(results: Results) -> None:
    """Every attack is refused by the name of the file."""
    whole = [(name, attack, outcome) for name, attack, outcome in reads(results, "whole") if attack["refused"]]
    assert [(name, outcome) for name, attack, outcome in whole if attack["names"] not in outcome.get("refused", "-")] == []


def test_what_only_added_not_looked_at(results: Results) -> None:
    """What was only added is not looked at."""
    whole = [(name, attack, outcome) for name, attack, outcome in reads(results, "whole") if not attack["refused"]]
    assert whole
    assert [(name, outcome) for name, attack, outcome in whole if outcome.get("read") != "checkpoint_2"] == []


def test_damaged_checkpoint_passed_over_for_before(results: Results) -> None:
    """A damaged checkpoint is passed over for the one before."""
    found = {name: outcome.get("read") for name, _, outcome in reads(results, "previous")}
    assert set(found.values()) == {"checkpoint_1", "checkpoint_2"}
    assert [name for name, attack in results.items() if attack["damages"] and found[f"{name} (kernel/previous)"] != "checkpoint_1"] == []


def test_weights_refused_leave_model_as(results: Results) -> None:
    """Weights that are refused leave the model as it was."""
    outcomes = {outcome.get("read", "refused") for _, _, outcome in reads(results, "weights")}
    assert outcomes == {"refused", "checkpoint_2"}


def test_no_side_effects(results: Results) -> None:
    """Nothing is run nothing is changed and nothing outside is opened."""
    assert [(name, outcome["seen"]) for name, _, outcome in reads(results) if outcome["seen"]] == []
    assert not os.path.exists(hostile.CANARY)


def test_time_and_memory_of_attacks(results: Results, request: pytest.FixtureRequest) -> None:
    """No attack takes much memory; with `--soak`, none takes long (one that hangs is found without it)."""
    if request.config.getoption("--soak"):
        limits = [(name, read["seconds"], LONGEST + SECONDS_PER_BYTE * attack["bytes"]) for name, attack, read in reads(results)]
        assert [(name, seconds) for name, seconds, limit in limits if seconds > limit] == []
    much = [(name, outcome["memory"]) for name, attack, outcome in reads(results) if outcome["memory"] > 2 * attack["bytes"] + ROOM]
    assert much == []


def test_no_refusal_longer_than_screen(results: Results) -> None:
    """No refusal is longer than a screen."""
    assert [(name, outcome["length"]) for name, _, outcome in reads(results) if outcome.get("length", 0) > 2000] == []


def test_watch_sees_what_should(watched: dict[str, Any]) -> None:
    """What the tests above stand on."""
    assert watched["unseen"] == []


# -- damage at random ---------------------------------------------------------------------------------------------------


def read_all(folder: Path) -> None:
    saved = read_saved_state(open_checkpoint(folder), str(folder))
    for rank in range(saved.world or 0):
        saved.rank(rank)


@pytest.mark.soak
def test_damage_at_random_always_found(tmp_path: Path, rounds: Callable[..., int]) -> None:
    """Damage at random is always found."""
    for number in (1, 2):
        specimens.save(tmp_path / "base" / f"checkpoint_{number}", number, shard=100, note=f"note {number}")
    good, folder, previous = tmp_path / "base" / "checkpoint_2", tmp_path / "checkpoint_2", tmp_path / "base" / "checkpoint_1"
    read_all(good)
    for seed in range(rounds(ci=200, soak=2000)):
        chance = random.Random(seed)
        shutil.copytree(good, folder)
        name = MUTATIONS[seed % len(MUTATIONS)](chance, folder, previous)
        with pytest.raises(CheckpointError) as caught:
            read_all(folder)
        assert name in str(caught.value), seed
        if not name.startswith("rank_1."):  # it is read when that rank is asked for
            found = open_newest([folder, previous], "runs")
            assert found.checkpoint.folder == previous
            assert list(found.passed_over) == [folder]
        shutil.rmtree(folder)
