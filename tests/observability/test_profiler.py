"""The profiler's options are checked when they are written, every process leaves a trace, and the last one makes one of all."""

from __future__ import annotations

import json
import logging
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity

from slipstream.distributed.cluster import Process
from slipstream.distributed.process_group import Runtime
from slipstream.errors import ConfigError
from slipstream.observability import profiler
from slipstream.observability.options import PROFILE_PATTERN_NAME, ProfileKwargs
from slipstream.observability.profiler import MERGED_TRACE, merge_traces, run_profiler, top_operators


def names(path: Path) -> set[str]:
    return {event.get("name") for event in json.loads(path.read_text())["traceEvents"]}


def test_options_reach_torch() -> None:
    """What is written reaches torch."""
    handler = ProfileKwargs(activities=["CPU", ProfilerActivity.CPU], record_shapes=True, profile_memory=True, with_flops=True)
    with handler.build() as profiler:
        torch.ones(4, 4) @ torch.ones(4, 4)
    event = next(event for event in profiler.key_averages(group_by_input_shape=True) if event.key == "aten::mm")
    assert event.input_shapes[:2] == [[4, 4], [4, 4]]
    assert event.flops == 2 * 4**3
    assert ProfileKwargs().to_kwargs() == {}


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"activities": []}, "records nothing"),
        ({"activities": ["gpu"]}, "write some of cpu, "),
        ({"schedule_option": {"wait": 1, "warm": 1, "active": 1}}, "warm is not part of a schedule; write some of wait, warmup, active"),
        ({"schedule_option": {"wait": 1}}, "warmup, active is not there"),
        ({"schedule_option": {"wait": 1, "warmup": 0, "active": 0}}, "active counts calls .* from 1"),
        ({"schedule_option": {"wait": -1, "warmup": 1, "active": 1}}, "wait counts calls .* from 0"),
        ({"schedule_option": {"wait": 1.5, "warmup": 1, "active": 1}}, "wait counts"),
        ({"on_trace_ready": "print"}, "not a function"),
    ],
)
def test_invalid_profile_options(options: dict[str, Any], complaint: str) -> None:
    """What makes no sense is refused where it is written."""
    with pytest.raises(ConfigError, match=complaint):
        ProfileKwargs(**options)


def test_missing_device() -> None:
    """A device that is not here is refused when it is used."""
    with pytest.raises(ConfigError, match="cannot record that; it can record cpu"):
        ProfileKwargs(activities=["xpu"]).build()


def test_trace_written(tmp_path: Path) -> None:
    """A trace is written into a folder that is made."""
    folder = tmp_path / "a" / "b"
    with run_profiler(ProfileKwargs(output_trace_dir=str(folder)), Runtime(Process(rank=3, world_size=4))):
        torch.ones(3).cumsum(0)
    assert [path.name for path in folder.iterdir()] == [PROFILE_PATTERN_NAME.format(suffix=3)] == ["profile_3.json"]
    assert "aten::cumsum" in names(folder / "profile_3.json")


def test_trace_after_error(tmp_path: Path) -> None:
    """The trace is written when the block ends with an error."""
    with pytest.raises(RuntimeError, match="invalid for input"), run_profiler(ProfileKwargs(output_trace_dir=str(tmp_path))):
        torch.ones(3).cumsum(0).view(7)
    assert "aten::cumsum" in names(tmp_path / "profile_0.json")


def test_unwritable_folder(tmp_path: Path) -> None:
    """A folder that cannot be written is an error before the run."""
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(ConfigError, match="no trace can be written there"),
        run_profiler(ProfileKwargs(output_trace_dir=str(tmp_path / "file"))),
    ):
        pytest.fail("the block must not run")


@pytest.mark.filterwarnings("ignore:Warning. Profiler clears events at the end of each cycle")
@pytest.mark.parametrize("steps", [3, 4, 7])
def test_profile_schedule(tmp_path: Path, steps: int) -> None:
    """With a schedule the last cycle is kept and on trace ready sees every one."""
    seen = []
    handler = ProfileKwargs(
        schedule_option={"wait": 1, "warmup": 1, "active": 1, "repeat": 2},
        on_trace_ready=lambda profiler: seen.append(profiler.step_num),
        output_trace_dir=str(tmp_path),
    )
    with run_profiler(handler) as profiler:
        for step in range(steps):
            with torch.profiler.record_function(f"step {step}"):
                torch.ones(2) + 1
            profiler.step()
    assert seen == ([3] if steps < 6 else [3, 6])
    recorded = {name for name in names(tmp_path / "profile_0.json") if str(name).startswith("step ")}
    assert recorded == {"step 2" if steps < 6 else "step 5"}


def test_nothing_recorded(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Without a recording it says so."""
    with caplog.at_level(logging.WARNING):
        handler = ProfileKwargs(schedule_option={"wait": 5, "warmup": 1, "active": 1}, output_trace_dir=str(tmp_path))
        with run_profiler(handler):
            torch.ones(2)
    assert "nothing was recorded" in caplog.text
    assert list(tmp_path.iterdir()) == []


def test_trace_saved_by_user(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A trace that the user saved is not saved twice."""
    handler = ProfileKwargs(
        on_trace_ready=lambda profiler: profiler.export_chrome_trace(str(tmp_path / "mine.json")), output_trace_dir=str(tmp_path)
    )
    with run_profiler(handler):
        torch.ones(2)
    assert (tmp_path / "mine.json").exists()
    assert "on_trace_ready has saved the trace itself" in caplog.text


# -- one trace of all ranks -------------------------------------------------------------------------------------------


def processes(path: Path) -> dict[int, str]:
    events = json.loads(path.read_text())["traceEvents"]
    return {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}


def test_last_rank_merges(ranks: Any, tmp_path: Path) -> None:
    """The last rank merges the traces of each block and nobody waits."""
    def run(folder: str) -> tuple[list[str], list[list[str]]]:
        from slipstream import Accelerator, PartialState

        accelerator, seen, told = Accelerator(), [], []
        for block, last in enumerate((1, 0)):
            with accelerator.profile(ProfileKwargs(output_trace_dir=folder)):
                (torch.ones(2, requires_grad=True) + 1).sum().backward()
                with torch.profiler.record_function(f"block {block}"):
                    PartialState().wait_for_everyone()
                if PartialState().process_index == last:  # it goes on when the other has written, so it is the last
                    while not Path(folder, f"ended {block}").exists():
                        time.sleep(0.01)
            if PartialState().process_index != last:
                seen.append(sorted(path.name for path in Path(folder).glob("*.json")))
                Path(folder, f"ended {block}").touch()
            PartialState().wait_for_everyone()
            told.append(Path(folder, MERGED_TRACE).read_text())
            PartialState().wait_for_everyone()
        cycle = {"wait": 9 * PartialState().process_index, "warmup": 1, "active": 1}  # rank 1 never comes to it
        handler = ProfileKwargs(schedule_option=cycle, output_trace_dir=f"{folder}/alone")
        with run_profiler(handler, accelerator.state.runtime) as profiler:
            profiler.step()
        PartialState().wait_for_everyone()
        return told, seen

    (told, before), (_, later) = ranks(2).run(run, str(tmp_path))
    assert before == [["profile_0.json"]]
    assert later == [["profile_0.json", "profile_1.json", MERGED_TRACE]]
    for number, text in enumerate(told):
        merged = json.loads(text)
        named = {event["name"]: event for event in merged["traceEvents"]}
        assert f"block {number}" in named
        assert f"block {1 - number}" not in named
    hosts = {entry["host"] for entry in merged["slipstream"]["ranks"]}
    assert "one clock" in merged["slipstream"]["clocks"]
    assert len(hosts) == 1
    names = processes(tmp_path / MERGED_TRACE)
    (host,) = hosts
    assert {number: name for number, name in names.items() if name.endswith(")")} == {1000: f"rank 0 ({host})", 2000: f"rank 1 ({host})"}
    assert sorted(path.name for path in (tmp_path / "alone").iterdir()) == ["profile_0.json"]


def trace(folder: Path, rank: int, **more: Any) -> None:
    events = [
        {"ph": "M", "name": "process_name", "pid": 5, "tid": 0, "args": {"name": "python"}},
        {"ph": "M", "name": "process_labels", "pid": 5, "tid": 0, "args": {"labels": "CPU"}},
        {"ph": "M", "name": "process_labels", "pid": 0, "tid": 0, "args": {"labels": "GPU 0"}},
        {"ph": "X", "name": 'op \u00fc "quoted"', "pid": 5, "tid": 9, "ts": 10.5, "dur": 1.0, "args": {"pid": 5, "id": 1}},
        {"ph": "X", "name": "kernel", "pid": 0, "tid": 7, "ts": 11.0, "dur": 1.0},
        {"ph": "s", "name": "flow", "id": 3, "pid": 5, "tid": 9, "ts": 10.5},
        {"ph": "i", "name": "end", "pid": "", "tid": "", "ts": 12.0},
    ]
    (folder / f"profile_{rank}.json").write_text(json.dumps({**more, "traceEvents": events, "traceName": "x"}, indent=1))


def test_merged_ranks(tmp_path: Path) -> None:
    """Ranks are kept apart and laid over each other in time."""
    trace(tmp_path, 0, host_name="one", baseTimeNanoseconds=5_000_000)
    trace(tmp_path, 10, host_name="two", baseTimeNanoseconds=7_000_000)
    trace(tmp_path, 2, host_name="one", baseTimeNanoseconds=5_000_000)
    (tmp_path / "profile_mine.json").write_text("not ours")
    path = merge_traces(tmp_path)
    merged = json.loads(path.read_text())
    events = merged["traceEvents"]
    assert [entry["rank"] for entry in merged["slipstream"]["ranks"]] == [0, 2, 10]
    assert "one, two" in merged["slipstream"]["clocks"]
    assert merged["baseTimeNanoseconds"] == 5_000_000
    ops = [event for event in events if event["name"].startswith("op")]
    assert [(event["pid"], event["ts"]) for event in ops] == [(1000, 10.5), (3000, 10.5), (11000, 2010.5)]
    assert all(event["args"] == {"pid": 5, "id": 1} and event["name"] == 'op ü "quoted"' for event in ops)
    assert len({event["id"] for event in events if event["ph"] == "s"}) == 3
    order = {event["pid"]: event["args"]["sort_index"] for event in events if event["name"] == "process_sort_index"}
    assert [processes(path)[pid] for pid in sorted(order, key=lambda pid: order[pid])] == [
        f"{rank}{part}" for rank in ("rank 0 (one)", "rank 2 (one)", "rank 10 (two)") for part in ("", " GPU 0", " Traces")
    ]


def test_chunk_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces of any size give the same trace."""
    trace(tmp_path, 0, baseTimeNanoseconds=123456, deviceProperties=[{"id": 0}])
    trace(tmp_path, 1, baseTimeNanoseconds=123456)
    whole = merge_traces(tmp_path).read_text()
    for size in (1, 2, 3, 50):
        monkeypatch.setattr(profiler, "_CHUNK", size)
        assert merge_traces(tmp_path).read_text() == whole


@pytest.mark.parametrize(
    "text", ["", "[]", '{"a": 1}', '{"traceEvents": 3}', '{"traceEvents": [{"ph": "X"}, {"p', '{"traceEvents": [7]}', '{"a" 3}']
)
def test_damaged_trace(tmp_path: Path, text: str) -> None:
    """What is no trace is named and nothing is left."""
    trace(tmp_path, 0)
    (tmp_path / "profile_1.json").write_text(text)
    with pytest.raises(ConfigError, match=r"profile_1\.json is no"):
        merge_traces(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["profile_0.json", "profile_1.json"]


def test_folder_without_traces(tmp_path: Path) -> None:
    """A folder without traces is refused."""
    with pytest.raises(ConfigError, match="no trace in it"):
        merge_traces(tmp_path)
    with pytest.raises(ConfigError, match="no such folder"):
        merge_traces(tmp_path / "missing")


# -- the table --------------------------------------------------------------------------------------------------------


def test_table_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Where traces are written the table is shown."""
    with run_profiler(ProfileKwargs(activities=["cpu"], output_trace_dir=str(tmp_path))):
        torch.ones(8, 8) @ torch.ones(8, 8)
    assert "aten::mm" in capsys.readouterr().err


@pytest.mark.filterwarnings("ignore:Warning. Profiler clears events at the end of each cycle")
def test_table_of_last_cycle(caplog: pytest.LogCaptureFixture) -> None:
    """The table is of the last cycle and logged by the main process alone."""
    handler = ProfileKwargs(schedule_option={"wait": 0, "warmup": 1, "active": 1}, profile_memory=True)
    with caplog.at_level(logging.INFO, logger="slipstream.observability.profiler"):
        for rank in (0, 1):
            with run_profiler(handler, Runtime(Process(rank=rank, world_size=2))) as profiler:
                for _ in range(4):  # it ends with the warm-up of a third cycle
                    torch.ones(64, 64) @ torch.ones(64, 64)
                    profiler.step()
    assert caplog.text.count("time of operators") == 1
    assert "aten::mm" in caplog.text
    assert "memory" in caplog.text


def test_table_rows() -> None:
    """The rows are sorted and their shares are of all."""
    with ProfileKwargs(activities=["cpu"]).build() as profiler:
        torch.ones(300, 300) @ torch.ones(300, 300)
        torch.ones(3).cumsum(0)
    top = top_operators(profiler, 3)
    everything = top_operators(profiler, 1000)
    assert top.operators == everything.operators[:3]
    assert top.others == len(everything.operators) - 3
    assert [operator.self_time for operator in everything.operators] == sorted(
        (operator.self_time for operator in everything.operators), reverse=True
    )
    assert sum(operator.share for operator in everything.operators) == pytest.approx(1.0)
    assert all(operator.memory is None for operator in top.operators)
    assert {"aten::mm", "aten::cumsum"} <= {operator.name for operator in everything.operators}
    with pytest.raises(ConfigError, match="from 1"):
        top_operators(profiler, 0)
