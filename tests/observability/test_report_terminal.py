"""`slipstream watch --terminal`: one plain picture where there is no terminal, pictures until Ctrl-C where there is one."""

from __future__ import annotations

import io
import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st
from rich.cells import cell_len
from rich.console import Console

from slipstream.errors import ConfigError
from slipstream.observability.report.terminal import show_runs
from slipstream.observability.report.text_charts import apportion, draw_curve, draw_levels
from slipstream.observability.run_dir.folder import RunFolder


def add(folder: RunFolder, name: str, *records: dict[str, Any]) -> None:
    with open(folder.path / name, "a", encoding="utf-8") as file:
        file.writelines(json.dumps(record) + "\n" for record in records)


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    folder = RunFolder.create(tmp_path, "first", project="spirals")
    add(
        folder,
        "metrics.jsonl",
        *({"step": index, "time": 1.0, "values": {"train/loss": 1 / (index + 1), "rate": 0.125}} for index in range(100)),
    )
    interval = {"seconds": 1.0, "steps": 5, "samples": 320, "tokens": 4096, "slowest": [1, 4], "mfu": 0.25}
    phases = {"forward": [0.2, 0.3], "backward": [0.3, 0.6], "waiting": [0.5, None], "strange\x1b": [0.0, 0.1]}
    add(folder, "ledger.jsonl", *({"time": float(index), "last": index * 5, **interval, "phases": phases} for index in range(20)))
    folder.event("guard", "the loss is not a number \x1b[2J", step=7, rank=1)
    folder.event("checkpoint", "not a warning")
    return folder


def printed(place: Path, width: int, encoding: str = "utf-8", **options: Any) -> str:
    data = io.BytesIO()
    with io.TextIOWrapper(data, encoding=encoding, write_through=True) as file:
        show_runs([place], console=Console(file=file, width=width, **options))
        return data.getvalue().decode(encoding)


def test_plain_output(run: RunFolder, tmp_path: Path) -> None:
    """One plain picture where there is no terminal."""
    text = printed(tmp_path, 80)
    lines = text.splitlines()
    assert lines[0].startswith("first  running  ")
    assert lines[1] == "step 95  5 steps/s  320 samples/s  4096 tokens/s  25.0% of peak FLOPs"
    assert lines[2].split() == ["train/loss", "0.01", "rate", "0.125"]
    assert lines[3][0] in "⡇⡏⢹⡟⠏⢳⢻⣇⣏"
    assert "b=backward 36%" in text
    assert "ranks " in text
    assert "rank 1 came last in 80% of steps" in text
    assert "! step 7 rank 1 the loss is not a number \\x1b[2J" in text
    assert "not a warning" not in text
    assert "\x1b" not in text


def test_any_width(run: RunFolder, tmp_path: Path) -> None:
    """It fits any width."""
    RunFolder.create(tmp_path, "名前" * 20, project="empty")
    add(run, "metrics.jsonl", {"step": 1, "time": 1.0, "values": {"損失" * 30: 1.0, "words": "some", "none": "nan"}})
    for width in (20, 37, 80, 200):
        assert max(map(cell_len, printed(tmp_path, width).splitlines())) <= width


def test_ascii_terminal(run: RunFolder, tmp_path: Path) -> None:
    """A terminal of ASCII gets ASCII."""
    text = printed(tmp_path, 60, "ascii")
    assert text.isascii()
    assert "#" in text


def test_redraw_until_interrupt(run: RunFolder, tmp_path: Path) -> None:
    """A terminal is drawn again until it is interrupted."""
    file, seen = io.StringIO(), []

    def wait(seconds: float) -> None:
        seen.append(file.getvalue())
        if len(seen) == 3:
            raise KeyboardInterrupt
        add(run, "metrics.jsonl", {"step": 100 + len(seen), "time": 1.0, "values": {"train/loss": 77.25 + len(seen)}})
        if len(seen) == 2:
            RunFolder.create(tmp_path, "second", project="spirals")

    show_runs([tmp_path], console=Console(file=file, width=80, height=30, force_terminal=True), wait=wait)
    assert "77.25" not in seen[0]
    assert "78.25" in seen[1]
    assert "79.25" in seen[2]
    assert "second" in seen[2]
    after = file.getvalue()[len(seen[2]) :]
    assert "\x1b[?1049l" in after, "the screen is given back"
    assert "79.25" in after.split("\x1b[?1049l")[1], "with the last picture"


def test_runs_that_do_not_fit(run: RunFolder, tmp_path: Path) -> None:
    """Runs that do not fit are counted."""
    for number in range(5):
        RunFolder.create(tmp_path, f"other-{number}", project="spirals")
    file = io.StringIO()

    def wait(seconds: float) -> None:
        raise KeyboardInterrupt

    show_runs([tmp_path], console=Console(file=file, width=80, height=8, force_terminal=True), wait=wait)
    screen = file.getvalue().split("\x1b[?1049l")[0]
    assert "more runs: name one to see it" in screen
    assert "first" not in screen


def test_dead_run(run: RunFolder, tmp_path: Path) -> None:
    """A run that died is not shown as if it went on."""
    attempt = run.info["attempts"][0]
    now = round(time.time())
    run.update(attempts=[{**attempt, "host": "elsewhere"}], started=now - 1000)
    for file in run.path.iterdir():
        os.utime(file, (now - 365, now - 365))
    RunFolder.create(tmp_path, "older", project="spirals").update(started=5.0)
    lines = printed(tmp_path, 80).splitlines()
    assert lines[0].startswith("older  running  "), "what lives comes first"
    place = next(place for place, line in enumerate(lines) if line.startswith("first"))
    assert lines[place] == "first  running, no sign of life for 6 min  10:35"
    assert lines[place + 1] == "step 95"
    run.update(attempts=[{**attempt, "pid_started": 1}], started=now + 1000)
    assert printed(run.path, 80).splitlines()[0] == "first  killed  0:00"


def test_waits_for_first_run(tmp_path: Path) -> None:
    """A terminal waits for the first run."""
    file, seen = io.StringIO(), []

    def wait(seconds: float) -> None:
        seen.append(file.getvalue())
        if len(seen) == 2:
            raise KeyboardInterrupt
        RunFolder.create(tmp_path, "first", project="spirals")

    show_runs([tmp_path], console=Console(file=file, width=80, height=30, force_terminal=True), wait=wait)
    assert "waiting for the first run" in seen[0]
    assert "first  " not in seen[0]
    assert "first" in seen[1][len(seen[0]) :]


def test_dumb_terminal(run: RunFolder, tmp_path: Path) -> None:
    """A terminal that can only print gets plain pictures."""
    file, seen = io.StringIO(), []

    def wait(seconds: float) -> None:
        seen.append(file.getvalue())
        if len(seen) == 2:
            raise KeyboardInterrupt

    show_runs([tmp_path], console=Console(file=file, width=80, force_terminal=True, _environ={"TERM": "dumb"}), wait=wait)
    assert file.getvalue().count("train/loss") == 2
    assert "\x1b" not in file.getvalue()


def test_no_runs(tmp_path: Path) -> None:
    """A place without runs says what is there."""
    with pytest.raises(ConfigError, match="has no run in it"):
        show_runs([tmp_path])


# -- drawing --------------------------------------------------------------------------------------------------------------

NUMBERS = st.one_of(st.none(), st.floats(allow_nan=False, allow_infinity=False))


@settings(max_examples=60)
@given(ys=st.lists(NUMBERS, min_size=1, max_size=40), width=st.integers(1, 20), height=st.integers(1, 4), ascii_only=st.booleans())
def test_curve_size(ys: list[float | None], width: int, height: int, ascii_only: bool) -> None:
    """A curve of any numbers fills its place."""
    lines = draw_curve(range(len(ys)), ys, width, height, ascii_only=ascii_only)
    assert len(lines) == height
    assert {len(line) for line in lines} == {width}
    empty = not "".join(lines).strip(" \u2800")
    assert empty == all(y is None for y in ys)


def test_rising_curve() -> None:
    """A rising curve rises."""
    lines = draw_curve(range(100), [float(index) for index in range(100)], 10, 3)
    assert [line.strip("\u2800") != "" for line in lines] == [True] * 3
    assert lines[0].endswith("⠊") or lines[0].endswith("⠋") or lines[0].endswith("⠉")
    assert lines[0].startswith("\u2800")
    assert lines[2].endswith("\u2800")


@settings(max_examples=40)
@given(parts=st.dictionaries(st.text(max_size=3), st.floats(0, 1e6), max_size=9), width=st.integers(0, 100))
def test_apportion_adds_up(parts: dict[str, float], width: int) -> None:
    """The parts of a bar add up to it."""
    found = apportion(parts, width)
    assert sum(found.values()) == (width if sum(parts.values()) > 0 else 0)
    assert all(count >= 0 for count in found.values())


def test_equal_levels() -> None:
    """Levels of equal values are equal."""
    assert draw_levels([2.0, 2.0, None]) == "▄▄ "
    assert draw_levels([2.0, 2.0], low=0.0) == "██"
    assert draw_levels([]) == ""
