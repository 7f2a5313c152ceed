"""kill -9 in the middle of work that is handed out: every item is in the result exactly once, and the run says who was lost."""

# ruff: noqa: F401, F811 - the fixtures come from launching.py by name

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest
from launching import command, eventually, free_port, gone, launch, script

pytestmark = pytest.mark.launched

COUNT = 120
WORK = """
from telling import up
import json, os, sys, time
from slipstream import PartialState

way, checkpoint, after = sys.argv[1:4]
state = PartialState()
rank, attempt = state.process_index, os.environ["TORCHELASTIC_RESTART_COUNT"]
up()

def work(number):
    time.sleep(0.02)
    with open(f"{os.environ['NOTES']}/worked", "a") as file:
        file.write(f"{attempt} {rank} {number}\\n")
    return [number, rank]

if way == "map":
    results = state.map_across_processes(work, range(120), checkpoint=checkpoint or None)
else:
    with state.split_between_processes(range(120), balance="dynamic", checkpoint=checkpoint or None) as items:
        for item in items:
            items.done(work(item))
    results = items.results()
with open(f"{os.environ['NOTES']}/results-{attempt}-{rank}", "w") as file:
    json.dump(results, file)
if after:
    state.wait_for_everyone()
"""


def worked(folder: Path, attempt: int = 0, by: int | None = None) -> list[int]:
    try:
        lines = [[int(word) for word in line.split()] for line in (folder / "worked").read_text().splitlines()]
    except FileNotFoundError:
        return []
    return [number for made, rank, number in lines if made == attempt and by in (None, rank)]


def results(folder: Path, attempt: int = 0) -> dict[int, list[list[int]]]:
    return {int(path.name.rsplit("-", 1)[1]): json.loads(path.read_text()) for path in folder.glob(f"results-{attempt}-*")}


def kept(path: Path) -> list[list[int]]:
    """What the journal says, by item; each has to stand there once."""
    lines = [json.loads(line) for line in path.read_text().splitlines()][1:]
    assert [line["index"] for line in lines] == list(range(COUNT))
    return [line["result"] for line in lines]


@pytest.mark.parametrize(("way", "lost"), [("map", 2), ("loop", 0)])
def test_others_finish_items_of_killed(command, script, tmp_path, way, lost):
    """The others finish what a killed worker leaves."""
    running = command("--cpu", "--num_processes", "4", script(WORK), way, "", "")
    pids = running.pids(4)
    assert eventually(lambda: len(worked(tmp_path, by=lost)) > 4)
    os.kill(pids[lost], signal.SIGKILL)
    finished = running.finish()
    assert finished.code == 128 + signal.SIGKILL
    assert f"slipstream: rank {lost} of 4 (host {os.uname().nodename}, pid {pids[lost]}) was ended by SIGKILL." in finished.err
    assert "what it had not finished goes to the others" in finished.err
    found = results(tmp_path)
    assert sorted(found) == [rank for rank in range(4) if rank != lost]
    for entry in found.values():
        assert [number for number, _ in entry] == list(range(COUNT)), "every item exactly once, in order"
        assert entry == next(iter(found.values())), "the same on every process that is left"
    assert len(worked(tmp_path)) <= COUNT + 10, "only what was not finished is worked on again"
    assert {by for _, by in entry} == set(range(4)), "and what the lost one had finished counts"


def test_restart_repeats_no_finished_item(command, script, tmp_path):
    """With restarts all come back and nothing finished is done again."""
    path = tmp_path / "results.jsonl"
    running = command("--cpu", "--num_processes", "4", "--max_restarts", "1", script(WORK), "map", str(path), "meet")
    pids = running.pids(4)
    assert eventually(lambda: len(worked(tmp_path)) > 20)
    os.kill(pids[0], signal.SIGKILL)
    finished = running.finish()
    assert finished.code == 0, finished.err
    assert "starting all processes again: attempt 2 of 2" in finished.err, "the barrier after the work needs everybody"
    assert worked(tmp_path, attempt=1) == [], "the others had finished everything before"
    assert [results(tmp_path, 1)[rank] for rank in range(4)] == [kept(path)] * 4


def test_next_attempt_when_nobody_left(launch, script, tmp_path):
    """Where nobody is left the next attempt continues."""
    path = tmp_path / "results.jsonl"
    dying = script(WORK.replace("time.sleep(0.02)", "time.sleep(0.02); attempt == '0' and number >= 30 and os.kill(os.getpid(), 9)"))
    finished = launch("--cpu", "--num_processes", "2", "--max_restarts", "1", dying, "map", str(path), "")
    assert finished.code == 0, finished.err
    assert sorted(worked(tmp_path) + worked(tmp_path, attempt=1)) == list(range(COUNT)), "nothing is repeated, nothing lost"
    assert [number for number, _ in kept(path)] == list(range(COUNT))


def test_killed_run_resumes_other_size(command, script, launch, tmp_path):
    """A run that was killed resumes with another number of processes."""
    path = tmp_path / "results.jsonl"
    running = command("--cpu", "--num_processes", "3", script(WORK), "loop", str(path), "")
    pids = running.pids(3)
    assert eventually(lambda: len(worked(tmp_path)) > 20)
    running.process.kill()
    running.finish()
    assert eventually(lambda: all(gone(pid) for pid in pids.values()))
    before = {json.loads(line)["index"] for part in tmp_path.glob("results.jsonl.part-*") for line in part.read_text().splitlines()}
    assert len(before) > 15
    (tmp_path / "worked").unlink()
    finished = launch("--cpu", "--num_processes", "2", script(WORK), "map", str(path), "meet")
    assert finished.code == 0, finished.err
    assert sorted(worked(tmp_path)) == [number for number in range(COUNT) if number not in before], "nothing is repeated, nothing lost"
    assert [number for number, _ in kept(path)] == list(range(COUNT))


def test_own_failure_ends_all(command, script, tmp_path):
    """A worker that fails by itself still ends all."""
    train = script(WORK.replace("time.sleep(0.02)", "time.sleep(0.02); assert number != 50"))
    finished = command("--cpu", "--num_processes", "2", train, "map", "", "").finish()
    assert finished.code == 1
    assert finished.err.count("Traceback") == 1
    assert "at item 50" in finished.err
    assert "stopped because of it: PeerLostError: map_across_processes cannot complete" in finished.err
    assert results(tmp_path) == {}


def test_exit_zero_with_items_fails(command, script, tmp_path):
    """Leaving with exit code 0 in the middle is a failure."""
    train = script(WORK.replace("time.sleep(0.02)", "time.sleep(0.02); number > 20 and os._exit(0)"))
    finished = command("--cpu", "--num_processes", "2", train, "map", "", "").finish()
    assert finished.code == 1
    assert "ended with exit code 0 while it was processing items of the work queue" in finished.err
    assert results(tmp_path) == {}


def test_failure_before_work_is_cause(command, script, tmp_path):
    """Who fails before the work begins is the cause in the summary."""
    train = script(WORK.replace("range(120), checkpoint", "range(120), key=lambda number: 1 // (rank == 0), checkpoint"))
    finished = command("--cpu", "--num_processes", "2", train, "map", "", "").finish()
    assert finished.code == 1
    assert "rank 0 stopped because of it: PeerLostError: map_across_processes cannot begin" in finished.err
    assert "slipstream: rank 1 of 2" in finished.err


def test_other_machine_continues(command, script, tmp_path):
    """The processes of another machine continue too."""
    path = tmp_path / "results.jsonl"
    words = ("--cpu", "--num_machines", "2", "--num_processes", "4", "--main_process_ip", "127.0.0.1")
    words += ("--main_process_port", free_port())
    machines = [command(*words, "--machine_rank", str(rank), script(WORK), "map", str(path), "") for rank in range(2)]
    pids = machines[0].pids(4)
    assert eventually(lambda: len(worked(tmp_path, by=3)) > 4)
    os.kill(pids[3], signal.SIGKILL)
    for machine in machines:
        finished = machine.finish()
        assert finished.code == 137, finished.err
        assert "rank 3 of 4" in finished.err
    assert sorted(results(tmp_path)) == [0, 1, 2]
    assert list(results(tmp_path).values()) == [kept(path)] * 3


def test_poison_item_spares_some(command, script, tmp_path):
    """An item that ends every process does not end all of them."""
    path = tmp_path / "results.jsonl"
    deadly = script(WORK.replace("time.sleep(0.02)", "time.sleep(0.02); number == 50 and os.kill(os.getpid(), 9)"))
    finished = command("--cpu", "--num_processes", "4", deadly, "map", str(path), "").finish()
    assert finished.code == 137
    assert "item 50 may be what ends processes: two have died with it" in finished.err, "in front of what the summary cuts away"
    parts = [json.loads(line)["index"] for part in tmp_path.glob("*.part-*") for line in part.read_text().splitlines()]
    assert sorted(parts) == [number for number in range(COUNT) if number != 50], "all the others are finished and kept"
