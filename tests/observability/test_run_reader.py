"""Runs as they are read while they are written: whole lines and no others, nothing twice, and nothing outside of the folder."""

from __future__ import annotations

import json
import os
from array import array
from math import inf, isnan, nan
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from slipstream.observability.run_dir import reader, reader as lines_module
from slipstream.observability.run_dir.folder import RunFolder
from slipstream.observability.run_dir.reader import MAX_LINE, Run
from slipstream.observability.run_dir.series import IntervalList, normalize_interval

PHASES = ("data", "forward", "backward", "communication", "waiting", "optimizer", "checkpoint", "evaluation", "other")


def write(folder: Path, name: str, *records: Any, end: str = "\n") -> None:
    with open(folder / name, "a", encoding="utf-8") as file:
        file.write("\n".join(record if isinstance(record, str) else json.dumps(record) for record in records) + end)


def values(step: int | None, **named: Any) -> dict[str, Any]:
    return {"step": step, "time": 100.0 + (step or 0), "values": named}


def read(folder: Path) -> Run:
    run = Run(folder)
    run.refresh()
    return run


# -- whole lines ----------------------------------------------------------------------------------------------------------


def test_truncated_file(tmp_path: Path) -> None:
    """A writer cut off at any byte leaves all whole lines."""
    text = "".join(json.dumps(values(step, loss=step / 7, größe="é" * step), ensure_ascii=False) + "\n" for step in range(4)).encode()
    for cut in range(len(text) + 1):
        (tmp_path / "metrics.jsonl").write_bytes(text[:cut])
        run = read(tmp_path)
        assert list(run.series["loss"].steps if run.series else []) == list(range(text[:cut].count(b"\n")))
        assert run.skipped == {}


def test_reading_in_pieces(tmp_path: Path) -> None:
    """Reading in pieces of any size gives what reading at once gives."""
    text = b"".join(json.dumps(values(step, loss=step / 7, note=f"step {step}")).encode() + b"\n" for step in range(40)) + b"torn"
    whole, growing = tmp_path / "whole", tmp_path / "growing"
    whole.mkdir()
    growing.mkdir()
    (whole / "metrics.jsonl").write_bytes(text)
    expected = read(whole).view()["series"]
    for piece in (1, 7, 50, 61, 400):
        (growing / "metrics.jsonl").write_bytes(b"")
        run = Run(growing)
        with open(growing / "metrics.jsonl", "ab", buffering=0) as file:
            for start in range(0, len(text), piece):
                file.write(text[start : start + piece])
                run.refresh()
        assert run.view()["series"] == expected
        assert run.texts["note"]["text"] == "step 39"
        assert run.beginnings == 0


def test_block_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks do not change what is read."""
    write(tmp_path, "metrics.jsonl", *(values(step, loss=step) for step in range(50)))
    monkeypatch.setattr(lines_module, "_BLOCK", 100)
    run = Run(tmp_path)
    seen = []
    while run.refresh(blocks=1):
        seen.append(len(run.series["loss"]))
    assert seen == sorted(seen)
    assert len(seen) > 10
    assert list(run.series["loss"].values) == list(range(50))


def test_too_long_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A line that is too long is passed over and counted."""
    monkeypatch.setattr(lines_module, "_BLOCK", 64)
    monkeypatch.setattr(lines_module, "MAX_LINE", 300)
    for length in (150, 290, 400, 1000, 1500, 5000):
        folder = tmp_path / str(length)
        folder.mkdir()
        run = Run(folder)
        write(folder, "metrics.jsonl", values(1, loss=1.0), end="\n" + "x" * (length // 2))
        run.refresh()
        write(folder, "metrics.jsonl", "x" * (length // 2), values(2, loss=2.0))
        run.refresh()
        assert list(run.series["loss"].values) == [1.0, 2.0]
        assert run.skipped == {f"metrics.jsonl: lines that are {'too long' if length > 300 else 'not JSON'}": 1}
    assert MAX_LINE >= 1 << 20, "tables are long lines"


def test_refresh_without_news(tmp_path: Path) -> None:
    """Nothing is read twice and a refresh without news says so."""
    run = Run(tmp_path)
    assert not run.refresh()
    write(tmp_path, "events.jsonl", {"time": 1.0, "kind": "start", "text": "one process"})
    assert run.refresh()
    assert [event["kind"] for event in run.fresh_events] == ["start"]
    assert not run.refresh()
    assert run.fresh_events == []
    assert len(run.events) == 1


# -- what is not as it should be ------------------------------------------------------------------------------------------


def test_unknown_lines_counted(tmp_path: Path) -> None:
    """What is no line of ours is counted and the rest is read."""
    bad = ["{torn", "[1, 2]", "7", "null", '{"something": 1}', "", "  ", "[" * 100_000, '{"step": "x", "values": {"loss": 1}}']
    write(tmp_path, "metrics.jsonl", *bad, '  {"step": 1, "time": 2.0, "values": {"loss": 0.5}}\r', end="\n")
    with open(tmp_path / "metrics.jsonl", "ab") as file:
        file.write(b'{"step": 2, "values": {"\xff": 1}}\n')
    write(tmp_path, "ledger.jsonl", {"time": 1}, "nonsense")
    write(tmp_path, "events.jsonl", {"time": 1}, {"time": 1, "kind": "end", "why": [nan]})
    (tmp_path / "run.json").write_text("{")
    run = read(tmp_path)
    assert list(run.series["loss"].values) == [0.5]
    assert run.skipped == {
        "metrics.jsonl: lines that are not JSON": 2,
        "metrics.jsonl: lines of an unknown kind": 4,
        "metrics.jsonl: lines that are not text": 1,
        "ledger.jsonl: lines of an unknown kind": 1,
        "ledger.jsonl: lines that are not JSON": 1,
        "events.jsonl: lines of an unknown kind": 1,
        "run.json is not JSON": 1,
    }
    assert run.events == [{"time": 1, "kind": "end", "why": [None]}]
    json.dumps(run.view(), allow_nan=False)


@settings(max_examples=100)
@given(
    st.recursive(
        st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5)),
        lambda inner: st.one_of(
            st.lists(inner, max_size=3),
            st.dictionaries(st.sampled_from(["step", "time", "values", "images", "table", "a"]), inner, max_size=4),
        ),
        max_leaves=12,
    )
)
def test_any_json(tmp_path_factory: pytest.TempPathFactory, value: Any) -> None:
    """Any JSON is read or counted and can be shown."""
    folder = tmp_path_factory.mktemp("run")
    for name in ("metrics.jsonl", "ledger.jsonl", "events.jsonl"):
        write(folder, name, value, {"time": 1.0, "kind": "end", "phases": {"data": [1.0]}, "values": {"last": 1}})
    for name in ("run.json", "config.json", "environment.json"):
        write(folder, name, value)
    run = read(folder)
    assert "last" in run.series
    assert run.events[-1]["kind"] == "end"
    assert run.ledger[-1]["phases"] == {"data": [1.0]}
    json.dumps(run.view(), allow_nan=False)


@settings(max_examples=200)
@given(
    st.one_of(
        st.text(max_size=30),
        st.sampled_from(['{"a":1}', '{"a": 1}  ', ' {"a":1}', "{}{}", '{"a":1}x', "\ufeff{}", "1 2", "NaN", '{"a":1e999}']),
    )
)
def test_fast_path_equals_slow_path(line: str) -> None:
    """The quick way to a record is the plain way."""
    try:
        expected = json.loads(line)
    except ValueError:
        expected = None
    found = reader._parse_record(line, reader.Counter())
    assert repr(found) == repr(expected if isinstance(expected, dict) else None)


def test_numbers_and_texts(tmp_path: Path) -> None:
    """Numbers of every kind become numbers and texts become texts."""
    named = {"a": "nan", "b": "inf", "c": "-inf", "d": True, "e": 3, "f": None, "g": 10**400, "h": "words", "i": [1], "j": {"k": 1}}
    write(tmp_path, "metrics.jsonl", values(None, **named), values(None, e=4))
    run = read(tmp_path)
    found = {name: series.values[0] for name, series in run.series.items()}
    assert isnan(found.pop("a"))
    assert isnan(found.pop("f"))
    assert found == {"b": inf, "c": -inf, "d": 1.0, "e": 3.0, "g": inf}
    assert list(run.series["e"].steps) == [0, 1], "a line without a step has its number"
    assert run.texts == {"h": {"step": None, "time": 100.0, "text": "words"}}
    assert run.skipped == {"metrics.jsonl: values that are neither numbers nor texts": 2}
    assert run.view()["series"]["b"]["values"] == [None]


def test_replaced_file(tmp_path: Path) -> None:
    """A file that was replaced or shortened or written over is read anew."""
    file = tmp_path / "metrics.jsonl"
    write(tmp_path, "metrics.jsonl", *(values(step, loss=1.0) for step in range(5)))
    run = read(tmp_path)
    other = tmp_path / "other"
    write(tmp_path, "other", *(values(step, loss=2.0) for step in range(9)))
    os.replace(other, file)
    assert run.refresh()
    assert list(run.series["loss"].values) == [2.0] * 9
    file.write_text(json.dumps(values(1, loss=3.0)) + "\n")
    assert run.refresh()
    assert list(run.series["loss"].values) == [3.0]
    file.write_text("".join(json.dumps(values(step, other=4.0)) + "\n" for step in range(9)))
    assert run.refresh()
    assert {name: list(curve.values) for name, curve in run.series.items()} == {"other": [4.0] * 9}
    assert run.beginnings == 3
    file.unlink()
    assert not run.refresh()
    assert list(run.series) == ["other"], "what was read stays"


def test_links_and_pipes_ignored(tmp_path: Path) -> None:
    """No link and no pipe is read."""
    outside, folder = tmp_path / "outside", tmp_path / "run"
    outside.mkdir()
    folder.mkdir()
    write(outside, "secret.jsonl", values(1, secret=1.0), {"kind": "secret"})
    write(outside, "run.json", {"name": "secret"})
    (folder / "metrics.jsonl").symlink_to(outside / "secret.jsonl")
    (folder / "run.json").symlink_to(outside / "run.json")
    os.mkfifo(folder / "events.jsonl")
    run = read(folder)
    assert (run.series, run.info, run.events) == ({}, {}, [])
    assert len(run.skipped) == 3
    assert sum("symbolic link" in why for why in run.skipped) == 2
    assert any("pipe" in why for why in run.skipped)
    (folder / "metrics.jsonl").unlink()
    write(folder, "metrics.jsonl", values(1, loss=1.0))
    assert run.refresh()
    assert len(run.skipped) == 2, "a file that can be read now is told no more"


def test_images_outside_left_out(tmp_path: Path) -> None:
    """Pictures that lead elsewhere are left out."""
    paths = ["media/a.png", "../run.json", "/etc/passwd", "run.json", "media/../run.json", 7, "media\\a"]
    write(tmp_path, "metrics.jsonl", {"step": 3, "time": 1.0, "images": {"samples": paths, "other": "media/b.png"}})
    run = read(tmp_path)
    assert run.images == {"samples": [{"step": 3, "time": 1.0, "paths": ["media/a.png"]}]}
    assert run.skipped == {"metrics.jsonl: pictures whose names lead elsewhere than to media/": 2}


# -- runs that go on, and long ones ---------------------------------------------------------------------------------------


def test_repeated_steps(tmp_path: Path) -> None:
    """Steps that are done again after a restart follow the first ones."""
    write(tmp_path, "metrics.jsonl", {"run": "a", "started": 1.0}, *(values(step, loss=1.0) for step in range(10)))
    run = read(tmp_path)
    write(tmp_path, "metrics.jsonl", {"run": "a", "started": 2.0}, *(values(step, loss=2.0) for step in range(6, 12)))
    run.refresh()
    series = run.series["loss"]
    assert list(series.steps) == [*range(10), *range(6, 12)]
    assert list(series.turns) == [10]
    assert series.view(100, low=8, high=9)["steps"] == [7, 8, 9, 7, 8, 9, 10], "both attempts"
    assert series.view(100, low=10, high=12)["values"] == [2.0, 2.0, 2.0]
    assert series.view(100, low=0, high=4)["steps"] == [0, 1, 2, 3, 4, 5]
    assert len(series.view(5, low=6, high=10)["steps"]) <= 5
    assert run.skipped == {}


def test_long_ledger_merged() -> None:
    """A long ledger becomes short and loses nothing."""
    def interval(second: int) -> dict[str, Any]:
        return {
            "time": float(second), "seconds": 1.0, "first": second * 3, "last": second * 3 + 2, "steps": 3,
            "samples": 48 if second % 2 else None, "tokens": None, "flops": 2.0,
            "phases": {name: [0.125, None if second < 50 else 0.25] for name in PHASES}, "slowest": [1, 2],
            "memory": {"host": [second, 7], "device": None}, "mfu": 0.5 if second < 100 else 0.25,
        }  # fmt: skip

    for count in (1, 15, 16, 17, 33, 64, 200):
        ledger = IntervalList(most=16)
        for second in range(count):
            ledger.add(normalize_interval(interval(second)))
        found = ledger.list
        assert len(found) <= 16
        assert [sum(entry[name] for entry in found) for name in ("seconds", "steps", "flops")] == [count, count * 3, count * 2]
        assert sum(entry["samples"] or 0 for entry in found) == count // 2 * 48
        assert sum(entry["phases"]["data"][0] for entry in found) == count * 0.125
        assert sum(entry["phases"]["other"][1] or 0 for entry in found) == max(0, count - 50) * 0.25
        assert (found[0]["first"], found[-1]["last"], found[-1]["time"]) == (0, count * 3 - 1, count - 1.0)
        assert all(entry["last"] + 1 == other["first"] for entry, other in zip(found, found[1:], strict=False))
        assert found[-1]["memory"] == {"host": [count - 1, 7], "device": None}
        assert sum(entry["mfu"] * entry["seconds"] for entry in found) == pytest.approx(min(count, 100) * 0.5 + max(0, count - 100) * 0.25)


def test_ledger_of_many_ranks() -> None:
    """A ledger of many ranks takes no more memory than one of few."""
    ledger = IntervalList()
    for second in range(80):
        ledger.add(normalize_interval({"time": second, "seconds": 1.0, "phases": dict.fromkeys(PHASES, [0.1] * 1000)}))
    assert len(ledger.list) * len(PHASES) * 1000 < 100_000
    assert sum(entry["seconds"] for entry in ledger.list) == 80


def test_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Events pictures texts and names have a limit."""
    monkeypatch.setattr(reader, "_MAX_EVENTS", 20)
    monkeypatch.setattr(reader, "_MAX_SERIES", 5)
    monkeypatch.setattr(reader, "_MAX_IMAGES", 8)
    write(tmp_path, "events.jsonl", *({"time": index, "kind": "warning", "text": "x" * 5000} for index in range(100)))
    write(tmp_path, "metrics.jsonl", *(values(1, **{f"m{index}": 1.0}) for index in range(9)))
    write(tmp_path, "metrics.jsonl", *({"step": index, "time": 1.0, "images": {"a": [f"media/{index}.png"]}} for index in range(50)))
    run = read(tmp_path)
    assert len(run.events) <= 20
    assert (run.events[0]["time"], run.events[-1]["time"]) == (0, 99)
    assert len(run.events[0]["text"]) == 2000
    assert len(run.events) + run.skipped["events.jsonl: older events"] == 100
    assert len(run.series) == 5
    assert run.skipped["metrics.jsonl: points of too many names (more than 5) or of too long ones, such as 'm5'"] == 4
    assert len(run.images["a"]) <= 8
    assert (run.images["a"][0]["step"], run.images["a"][-1]["step"]) == (0, 49)


# -- views ----------------------------------------------------------------------------------------------------------------


def test_view_is_complete(tmp_path: Path) -> None:
    """A view has all that the folder says."""
    folder = RunFolder.create(tmp_path, "first", project="spirals", attempt={"world_size": 2})
    folder.write_json("config.json", {"settings": {"lr": 0.1}, "options": {}})
    folder.write_json("environment.json", {"python": "3"})
    write(
        folder.path,
        "metrics.jsonl",
        *(values(step, loss=1 / (step + 1)) for step in range(5000)),
        {"step": 1, "time": 1.0, "values": {"note": "hi"}},
    )
    write(folder.path, "metrics.jsonl", {"step": 1, "time": 1.0, "table": {"name": "t", "columns": ["a"], "rows": [[1], [nan]]}})
    write(folder.path, "ledger.jsonl", {"time": 2.0, "seconds": 1.0, "steps": 4, "phases": {"data": [0.5, None]}, "slowest": [1, 3]})
    view = read(folder.path).view(points=100)
    assert (view["name"], view["info"]["project"], view["config"]["settings"], view["environment"]) == (
        "first",
        "spirals",
        {"lr": 0.1},
        {"python": "3"},
    )
    loss = view["series"]["loss"]
    assert loss["count"] == 5000
    assert len(loss["steps"]) == len(loss["times"]) == len(loss["values"]) <= 100
    assert (loss["steps"][0], loss["steps"][-1], loss["values"][0], loss["values"][-1]) == (0, 4999, 1.0, 0.0002)
    assert (view["ledger"]["phases"], view["ledger"]["slowest"], view["ledger"]["steps"]) == ({"data": [[0.5, None]]}, [[1, 3]], [4])
    assert view["tables"]["t"] == {"step": 1, "time": 1.0, "columns": ["a"], "rows": [[1], [None]], "count": 2}
    assert [entry["kind"] for entry in view["events"]] == ["start"]
    folder.end("finished")
    run = read(folder.path)
    assert run.info["state"] == "finished"
    zoomed = run.view(names=["loss", "not there"], points=100, low=1000, high=1050)["series"]
    assert list(zoomed) == ["loss"]
    assert zoomed["loss"]["steps"] == list(range(999, 1052))


def test_replaced_run_json(tmp_path: Path) -> None:
    """Run.json is read again when it is replaced."""
    folder = RunFolder.create(tmp_path, "first", project="spirals")
    run = read(folder.path)
    assert run.info["state"] == "running"
    folder.end("failed")
    assert run.refresh()
    assert run.info["state"] == "failed"


def test_points_in_arrays(tmp_path: Path) -> None:
    """Points are kept in arrays."""
    write(tmp_path, "metrics.jsonl", values(1, loss=1.0))
    series = read(tmp_path).series["loss"]
    assert all(isinstance(entry, array) and entry.typecode == "d" for entry in (series.steps, series.times, series.values))


def test_silent_run(tmp_path: Path) -> None:
    """A run that writes no more is silent and slow ones are given time."""
    folder = RunFolder.create(tmp_path, "first", project="p", attempt={"host": "elsewhere"})
    run = Run(folder.path)
    run.refresh()
    run.info["silent"] = "what a file says of it counts for nothing"
    assert "silent" not in run.current_info(run.touched + 59)
    assert run.current_info(run.touched + 61)["silent"] == 60
    assert run.current_info(run.touched + 359)["silent"] == 300
    (folder.path / "ledger.jsonl").write_text('{"time": 9.0, "seconds": 30.0, "phases": {}}\n' * 3)
    run.refresh()
    assert "silent" not in run.current_info(run.touched + 299), "a line every 30 seconds"
    assert run.current_info(run.touched + 301)["silent"] == 300
    folder.end("finished")
    run.refresh()
    assert run.current_info(run.touched + 1000) == run.info == folder.info
