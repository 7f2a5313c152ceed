"""Which failure came first, and what the user reads."""

from __future__ import annotations

import json
from dataclasses import asdict

import pytest
from hypothesis import given, strategies as st

from slipstream.launch.failure_report import (
    WorkerError,
    WorkerFailure,
    first_failure,
    first_failure_of_job,
    lost_machine_failures,
    read_worker_error,
    render_log_record,
    render_report,
    write_worker_error,
)
from slipstream.launch.store import ExitNotice


def error(when=0.0, kind="exception", message="boom", name="ValueError"):
    text = f'Traceback (most recent call last):\n  File "train.py", line 3, in <module>\n{name}: {message}\n'
    return WorkerError(kind=kind, type=name, message=message, traceback=text, when=when)


def failure(rank, exit_code=1, seen=10.0, order=0, **known):
    return WorkerFailure(rank=rank, host="node", pid=100 + rank, exit_code=exit_code, seen=seen, order=order, **known)


def test_earlier_exception_is_first():
    """Of two exceptions the earlier one is first."""
    late, early = failure(0, error=error(5.0)), failure(1, error=error(4.0), order=1)
    assert first_failure([late, early]) is early


def test_peer_lost_never_first():
    """A process that lost another is never first."""
    follower = failure(0, error=error(1.0, "peer", name="PeerLostError"))
    cause = failure(1, error=error(2.0), order=1)
    assert first_failure([follower, cause]) is cause


def test_broken_gloo_connection_is_consequence():
    """A broken gloo connection is a consequence."""
    message = "[/x/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:7"
    follower = failure(0, error=error(1.0, message=message, name="RuntimeError"))
    cause = failure(1, exit_code=-9, seen=2.0, order=1)
    assert first_failure([follower, cause]) is cause


def test_killed_process_causes_later_failures():
    """A killed process is the cause of what happened while its end was noticed."""
    killed = failure(1, exit_code=-9, seen=10.0, order=1)
    survivor = failure(0, error=error(9.9), seen=10.1, order=2)
    assert first_failure([survivor, killed]) is killed


def test_killed_process_not_cause_before():
    """A killed process is not the cause of what failed long before."""
    failed = failure(0, error=error(5.0), seen=11.0, order=2)
    killed = failure(1, exit_code=-9, seen=10.0, order=1)
    assert first_failure([failed, killed]) is failed


def test_all_consequences_show_first():
    """If every failure is a consequence, one of them is shown."""
    followers = [failure(rank, error=error(float(rank), "peer")) for rank in (1, 0)]
    assert first_failure(followers).rank == 0


def test_order_of_reports_between_machines():
    """Between machines the order of reports counts, not their clocks."""
    told_first = [failure(3, error=error(500.0))]
    told_second = [failure(0, error=error(1.0))]
    assert first_failure_of_job([told_first, told_second]).rank == 3
    followed = [failure(1, error=error(1.0, "peer"))]
    assert first_failure_of_job([followed, told_first]).rank == 3


failures = st.builds(
    failure,
    st.integers(0, 63),
    exit_code=st.one_of(st.integers(-64, -1), st.integers(1, 255), st.none()),
    seen=st.floats(0, 100),
    order=st.integers(0, 10),
    error=st.none()
    | st.builds(error, st.floats(0, 100), st.sampled_from(["exception", "config", "peer", "exit", "interrupt"]), st.text(max_size=20)),
)


@given(st.lists(failures, min_size=1, max_size=12, unique_by=lambda failure: failure.rank))
def test_first_failure_reported_last_once(some):
    """The first failure is reported last and once."""
    first = first_failure(some)
    text = render_report([some], world_size=64)
    assert text.count("slipstream: rank") == 1
    _, _, last = text.rpartition("slipstream: ")
    assert f"rank {first.rank} of 64" in last or f"{first.rank}" in last.split(" of 64")[0]


@given(st.lists(failures, min_size=1, max_size=5))
def test_failures_json_roundtrip(some):
    """Failures travel as JSON."""
    assert [WorkerFailure.from_json(json.loads(json.dumps(asdict(entry)))) for entry in some] == some


def test_report_of_exception():
    """The report of an exception."""
    cause = failure(1, error=error(1.0))
    told = {rank: error(2.0, "peer", f"rank 1 is gone\nmore of rank {rank}", "PeerLostError") for rank in (0, 2)}
    followers = [failure(rank, error=words) for rank, words in told.items()]
    assert render_report([[*followers, cause]], world_size=3) == (
        "ranks 0, 2 stopped because of it: PeerLostError: rank 1 is gone\n"
        "\n"
        "slipstream: rank 1 of 3 (host node, pid 101) failed with exit code 1.\n"
        "Traceback (most recent call last):\n"
        '  File "train.py", line 3, in <module>\n'
        "ValueError: boom"
    )


def test_log_record_begins_with_cause():
    """As a record the report begins with the cause."""
    cause = failure(1, error=error(1.0, message="boom\nmore"), log="logs/1/stderr.log")
    follower = failure(0, error=error(2.0, "peer", "rank 1 is gone", "PeerLostError"))
    message, traceback = render_log_record([[follower, cause]], world_size=2)
    assert message == (
        "rank 1 of 2 (host node, pid 101) failed with exit code 1: ValueError: boom\n"
        "rank 0 stopped because of it: PeerLostError: rank 1 is gone\n"
        "Its output: logs/1/stderr.log"
    )
    assert traceback.endswith("ValueError: boom\nmore")
    refused = failure(0, exit_code=2, error=error(1.0, "config", "x is wrong\nwrite y", "ConfigError"))
    told = "rank 0 of 1 (host node, pid 100) failed with exit code 2: x is wrong\nwrite y"
    assert render_log_record([[refused]], world_size=1) == (told, "")


def test_config_error_without_traceback():
    """The report of a configuration error shows no traceback."""
    refused = error(1.0, "config", "write x", "ConfigError")
    text = render_report([[failure(rank, exit_code=2, error=refused) for rank in (0, 1)]], world_size=2)
    assert text.endswith("failed with exit code 2.\nwrite x")
    assert text.startswith("rank 1 failed the same way: ConfigError\n")


def test_report_of_signal():
    """The report of a signal names it and what is known."""
    text = render_report(
        [[failure(1, exit_code=-9, detail="The kernel's out-of-memory killer ended it.", log="logs/1/stderr.log")]], world_size=2
    )
    assert text == (
        "slipstream: rank 1 of 2 (host node, pid 101) was ended by SIGKILL.\n"
        "The kernel's out-of-memory killer ended it.\n"
        "Its output: logs/1/stderr.log"
    )


def test_lost_machine_named_once():
    """A lost machine is named once with its ranks."""
    text = render_report([lost_machine_failures([2, 3], "node1", "Nothing was heard of it.", 1.0)], world_size=4)
    assert text == "slipstream: ranks 2-3 of 4 (host node1) were lost.\nNothing was heard of it."


def test_many_followers_summed_up():
    """Many followers are summed up."""
    cause = failure(0, exit_code=-11)
    rest = [failure(rank, error=error(20.0, "peer", f"text {rank}")) for rank in range(1, 64)]
    assert render_report([[cause, *rest]], world_size=64).splitlines()[0] == "ranks 1-63 stopped because of it"


@pytest.mark.parametrize("text", ["plain", "\udcff not text", "x" * 200_000])
def test_worker_error_file_roundtrip(text, tmp_path):
    """A worker error is read as it was written, or shortened."""
    path = str(tmp_path / "failure.json")
    write_worker_error(path, error(message=text))
    found = read_worker_error(path)
    assert found is not None
    assert found.message == text or "characters left out" in found.message or "\\udcff" in found.message


def test_worker_error_missing_or_broken(tmp_path):
    """A missing worker error and a broken one are None."""
    assert read_worker_error(tmp_path / "missing") is None
    (tmp_path / "half").write_text('{"kind": ')
    assert read_worker_error(tmp_path / "half") is None


def test_exit_notice_of_lost_machine():
    """A notice of a lost machine reads well."""
    notice = ExitNotice(3, "node1", 0, None, "nothing was heard")
    assert str(notice) == "rank 3 (host node1) was lost: nothing was heard"
    assert ExitNotice.from_json(notice.to_json()) == notice
