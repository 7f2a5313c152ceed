"""The profiler's options are checked when they are written, and every process leaves a trace."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity

from slipstream.errors import ConfigError
from slipstream.step.profile import PROFILE_PATTERN_NAME, ProfileKwargs, profiling


def names(path: Path) -> set[str]:
    return {event.get("name") for event in json.loads(path.read_text())["traceEvents"]}


def test_what_is_written_reaches_torch() -> None:
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
        ({"schedule_option": {"wait": -1, "warmup": 0, "active": 1}}, "wait counts calls .* from 0"),
        ({"schedule_option": {"wait": 1.5, "warmup": 0, "active": 1}}, "wait counts"),
        ({"on_trace_ready": "print"}, "not a function"),
    ],
)
def test_what_makes_no_sense_is_refused_where_it_is_written(options: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        ProfileKwargs(**options)


def test_a_device_that_is_not_here_is_refused_when_it_is_used() -> None:
    with pytest.raises(ConfigError, match="cannot record that; it can record cpu"):
        ProfileKwargs(activities=["xpu"]).build()


def test_a_trace_is_written_into_a_folder_that_is_made(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "b"
    with profiling(ProfileKwargs(output_trace_dir=str(folder)), process_index=3):
        torch.ones(3).cumsum(0)
    assert [path.name for path in folder.iterdir()] == [PROFILE_PATTERN_NAME.format(suffix=3)] == ["profile_3.json"]
    assert "aten::cumsum" in names(folder / "profile_3.json")


def test_the_trace_is_written_when_the_block_ends_with_an_error(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="invalid for input"), profiling(ProfileKwargs(output_trace_dir=str(tmp_path))):
        torch.ones(3).cumsum(0).view(7)
    assert "aten::cumsum" in names(tmp_path / "profile_0.json")


def test_a_folder_that_cannot_be_written_is_an_error_before_the_run(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(ConfigError, match="no trace can be written there"),
        profiling(ProfileKwargs(output_trace_dir=str(tmp_path / "file"))),
    ):
        pytest.fail("the block must not run")


@pytest.mark.filterwarnings("ignore:Warning. Profiler clears events at the end of each cycle")
@pytest.mark.parametrize("steps", [3, 4, 7])
def test_with_a_schedule_the_last_cycle_is_kept_and_on_trace_ready_sees_every_one(tmp_path: Path, steps: int) -> None:
    seen = []
    handler = ProfileKwargs(
        schedule_option={"wait": 1, "warmup": 1, "active": 1, "repeat": 2},
        on_trace_ready=lambda profiler: seen.append(profiler.step_num),
        output_trace_dir=str(tmp_path),
    )
    with profiling(handler) as profiler:
        for step in range(steps):
            with torch.profiler.record_function(f"step {step}"):
                torch.ones(2) + 1
            profiler.step()
    assert seen == ([3] if steps < 6 else [3, 6])
    recorded = {name for name in names(tmp_path / "profile_0.json") if str(name).startswith("step ")}
    assert recorded == {"step 2" if steps < 6 else "step 5"}


def test_without_a_recording_it_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        handler = ProfileKwargs(schedule_option={"wait": 5, "warmup": 1, "active": 1}, output_trace_dir=str(tmp_path))
        with profiling(handler):
            torch.ones(2)
    assert "nothing was recorded" in caplog.text
    assert list(tmp_path.iterdir()) == []


def test_a_trace_that_the_user_saved_is_not_saved_twice(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    handler = ProfileKwargs(
        on_trace_ready=lambda profiler: profiler.export_chrome_trace(str(tmp_path / "mine.json")), output_trace_dir=str(tmp_path)
    )
    with profiling(handler):
        torch.ones(2)
    assert (tmp_path / "mine.json").exists()
    assert "on_trace_ready has saved the trace itself" in caplog.text


def test_every_rank_writes_a_trace_of_its_own(ranks: Any, tmp_path: Path) -> None:
    def run(folder: str) -> None:
        from slipstream import PartialState

        with profiling(ProfileKwargs(output_trace_dir=folder), PartialState().process_index):
            torch.ones(2) + 1

    ranks(2).run(run, str(tmp_path))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["profile_0.json", "profile_1.json"]
