"""A run has a folder of its own: names are taken once, restarts go on in it, and a crash at any byte leaves whole lines readable."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from slipstream.errors import ConfigError
from slipstream.observability.run_dir.folder import (
    INDEX_EVERY,
    INDEX_RECORD,
    JsonLinesWriter,
    RunFolder,
    find_runs,
    git_state,
    index_path,
    is_gone,
    is_run,
    run_name,
)


def lines(path: Path) -> list[dict[str, int]]:
    whole = path.read_bytes().split(b"\n")
    return [json.loads(line) for line in whole[:-1] if line]


def test_taken_name(tmp_path: Path) -> None:
    """A name is taken once and the error says what to write."""
    RunFolder.create(tmp_path, "first", project="p").end("finished")
    with pytest.raises(ConfigError, match=r"a run named 'first' exists .*finished\): choose a different name, or pass resume=True"):
        RunFolder.create(tmp_path, "first", project="p")
    again = RunFolder.create(tmp_path, "first", project="p", resume=True, attempt={"world_size": 2})
    again.end("finished")
    assert [event["kind"] for event in lines(again.path / "events.jsonl")] == ["restart"]
    assert len(again.info["attempts"]) == 2


def test_unnamed_runs_separate(tmp_path: Path) -> None:
    """Runs without a name never share a folder."""
    names = {RunFolder.create(tmp_path, project="a b").name for _ in range(3)}
    assert len(names) == 3
    assert all(name.startswith("a-b-") for name in names)


def test_restarted_job_continues(tmp_path: Path) -> None:
    """A job that is started again goes on in its folder."""
    first = RunFolder.create(tmp_path, project="p", run_id="job7", attempt={"world_size": 2})
    other = RunFolder.create(tmp_path, project="p", run_id="job7")
    assert other.path != first.path, "the same job may hold two runs, one after the other"
    os.utime(first.path, (0, 0))
    restarted = RunFolder.create(tmp_path, project="p", run_id="job7", restarted=True)
    assert restarted.path == other.path
    assert RunFolder.create(tmp_path, project="p", run_id="job8", restarted=True).path not in (first.path, other.path)


@pytest.mark.parametrize("name", ["", "../up", "a/b", ".hidden", "x" * 121, "a\nb", "C:"])
def test_invalid_names(tmp_path: Path, name: str) -> None:
    """A name that is no name of a folder is refused."""
    with pytest.raises(ConfigError, match="cannot be that of a folder"):
        RunFolder.create(tmp_path, name, project="p")
    assert not any(tmp_path.rglob("run.json"))


def test_place_without_runs(tmp_path: Path) -> None:
    """A place without runs says what is there."""
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(ConfigError, match=r"has no run in it \(there is: notes\.txt\)"):
        find_runs(tmp_path)
    (tmp_path / "run.json").write_text("[1]")
    with pytest.raises(ConfigError, match="does not describe a run"):
        find_runs(tmp_path)
    (tmp_path / "run.json").write_text('{"format": "slipstream run", "version": 9}')
    with pytest.raises(ConfigError, match="is of version 9"):
        find_runs(tmp_path)
    for broken in ("[" * 100_000, "\x00", "x" * 2_000_000):
        (tmp_path / "run.json").write_text(broken)
        with pytest.raises(ConfigError, match="cannot be read"):
            find_runs(tmp_path)
    assert not is_run(tmp_path)


def test_pipes_and_links_are_no_runs(tmp_path: Path) -> None:
    """A pipe or a link in place of a run is none and blocks nobody."""
    real = RunFolder.create(tmp_path / "real", "one", project="p").path
    for name in ("pipe", "link"):
        (tmp_path / name).mkdir()
    os.mkfifo(tmp_path / "pipe" / "run.json")
    (tmp_path / "link" / "run.json").symlink_to(real / "run.json")
    assert not is_run(tmp_path / "pipe")
    assert not is_run(tmp_path / "link")


def test_find_runs_from_above(tmp_path: Path) -> None:
    """Runs are found from every folder above them."""
    made = [RunFolder.create(tmp_path, name, project="p").path for name in ("b", "a")]
    assert find_runs(tmp_path) == find_runs(tmp_path / "runs") == made, "oldest first"
    assert find_runs(made[1]) == [made[1]]


def test_damaged_run_left_out(tmp_path: Path) -> None:
    """One damaged run hides no other and is told."""
    good = RunFolder.create(tmp_path, "good", project="p").path
    odd = []
    for number, started in enumerate(('"now"', "null", "[1]", "{}", "NaN", "1e999", "9" * 400, "true")):
        odd.append(tmp_path / "runs" / f"odd-{number}")
        odd[-1].mkdir()
        odd[-1].joinpath("run.json").write_text(f'{{"format": "slipstream run", "version": 1, "attempts": "x", "started": {started}}}')
    for name, files in {"broken": {"run.json": "{"}, "empty": {"run.json": ""}, "missing": {"metrics.jsonl": ""}, "notes": {}}.items():
        (tmp_path / "runs" / name).mkdir()
        for file, text in files.items():
            (tmp_path / "runs" / name / file).write_text(text)
    left_out: list[tuple[Path, str]] = []
    assert find_runs(tmp_path, left_out) == [*odd, good]
    assert [path.name for path, _ in left_out] == ["broken", "empty", "missing"]
    assert "it has no run.json" in left_out[2][1]
    for path in odd:
        with pytest.raises(ConfigError, match="a run named .* exists"):
            RunFolder.create(tmp_path, path.name, project="p")
        assert len(RunFolder.create(tmp_path, path.name, project="p", resume=True).info["attempts"]) == 1


def test_only_damaged_runs(tmp_path: Path) -> None:
    """A place with damaged runs alone says what they lack."""
    (tmp_path / "runs" / "empty").mkdir(parents=True)
    (tmp_path / "runs" / "empty" / "run.json").touch()
    with pytest.raises(ConfigError, match=r"has no run in it that can be read: .*empty.run\.json cannot be read"):
        find_runs(tmp_path)


def test_dead_process_recognised(tmp_path: Path) -> None:
    """A process that is gone is told from one that lives."""
    run = RunFolder.create(tmp_path, "first", project="p", attempt={"world_size": 1})
    (attempt,) = run.info["attempts"]
    assert attempt["pid"] == os.getpid()
    assert not is_gone(run.info)
    with subprocess.Popen([sys.executable, "-c", ""]) as child:
        child.wait()
    for dead in ({"pid": child.pid}, {"pid_started": 1}):
        run.update(attempts=[{**attempt, **dead}])
        assert is_gone(run.info)
    with pytest.raises(ConfigError, match=r"UTC, killed\)"):
        RunFolder.create(tmp_path, "first", project="p")
    unknown = ({"host": "elsewhere"}, {"pid_namespace": 1}, {"pid": "x"}, {"pid": -1}, {"pid": 10**30}, {"pid": True})
    assert not any(is_gone({"attempts": [{**attempt, "pid": child.pid, **entry}]}) for entry in unknown)
    assert not any(is_gone({"attempts": entry}) for entry in (None, [], [None], "x", {}))


def test_uncreatable_folder(tmp_path: Path) -> None:
    """A folder that cannot be made is named."""
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be made below .*give a folder of yours as project_dir"):
        RunFolder.create(tmp_path / "file", project="p")
    (tmp_path / "runs").write_text("")
    with pytest.raises(ConfigError, match="runs exists and is not a folder: move it away"):
        RunFolder.create(tmp_path, project="p")


def test_torn_line(tmp_path: Path) -> None:
    """A line torn at any byte loses itself alone."""
    path = tmp_path / "metrics.jsonl"
    writer = JsonLinesWriter(path)
    for number in range(3):
        writer.append({"step": number, "text": "ä\n\u2028"})
    writer.close()
    whole = path.read_bytes()
    for cut in range(len(whole) + 1):
        path.write_bytes(whole[:cut])
        before = lines(path)
        assert [entry["step"] for entry in before] == list(range(whole[:cut].count(b"\n")))
        after = JsonLinesWriter(path)
        after.append({"step": 99})
        after.close()
        found = [line for line in path.read_bytes().split(b"\n") if line]
        assert json.loads(found[-1]) == {"step": 99}
        assert [json.loads(line) for line in found[: len(before)]] == before


def test_index_after_crash(tmp_path: Path) -> None:
    """The index says where lines begin also after a crash."""
    path = tmp_path / "metrics.jsonl"
    for part in range(3):
        writer = JsonLinesWriter(path, indexed=True)
        for number in range(INDEX_EVERY + 7):
            writer.append({"step": number + part}, step=number + part, time=float(part))
        writer.close()
        with open(path, "ab") as file:
            file.write(b'{"torn')
        with open(index_path(path), "ab") as file:
            file.write(b"half")
    whole = path.read_bytes()
    data = index_path(path).read_bytes()
    entries = [INDEX_RECORD.unpack_from(data, start) for start in range(0, len(data) - 4, INDEX_RECORD.size)]
    assert len(entries) == 4
    for place, (number, offset, step, _) in enumerate(entries):
        assert whole[:offset].count(b"\n") == number == place * INDEX_EVERY
        assert json.loads(whole[offset : whole.index(b"\n", offset)])["step"] == step


def test_git_state(tmp_path: Path) -> None:
    """The state of the repository is noted where there is one."""
    assert git_state(tmp_path) is None
    assert run_name("").startswith("run-")
