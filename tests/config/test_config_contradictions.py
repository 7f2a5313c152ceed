"""Options that contradict each other: both are named with their origins, and what to write instead."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from slipstream.config import ConfigError, for_worker, resolve, resolved_config
from slipstream.config.resolved_config import device_ids


@pytest.mark.parametrize(
    ("flags", "environ", "named"),
    [
        ({"machine_rank": 2, "num_machines": 2}, {}, ["machine_rank=2 (from --machine_rank)", "num_machines=2 (from --num_machines)"]),
        ({}, {"SLIPSTREAM_MACHINE_RANK": "1"}, ["machine_rank=1 (from SLIPSTREAM_MACHINE_RANK)", "num_machines=1 (by default)"]),
        ({"num_processes": 3}, {"SLIPSTREAM_NUM_MACHINES": "2"}, ["num_processes=3 (from --num_processes)", "num_machines=2 (from SLIP"]),
        ({"cpu": True, "gpu_ids": "0,1"}, {}, ["gpu_ids=0,1 (from --gpu_ids)", "cpu=true (from --cpu)"]),
        ({"num_processes": 4, "gpu_ids": "0,1"}, {}, ["num_processes=4 (from --num_processes)", "gpu_ids=0,1 (from --gpu_ids)"]),
        ({"multi_gpu": True, "cpu": True}, {}, ["multi_gpu=true (from --multi_gpu)", "cpu=true (from --cpu)"]),
        ({"cpu": True, "device": "xpu"}, {}, ["cpu=true (from --cpu)", "device=xpu (from --device)"]),
        ({"cpu": False, "device": "cpu"}, {}, ["cpu=false (from --cpu)", "device=cpu (from --device)"]),
        ({}, {"SLIPSTREAM_CPU": "1", "SLIPSTREAM_DEVICE": "xpu"}, ["from SLIPSTREAM_CPU", "device=xpu (from SLIPSTREAM_DEVICE)"]),
        ({"device": "cpu", "gpu_ids": "0,1"}, {}, ["gpu_ids=0,1 (from --gpu_ids)", "device=cpu (from --device)"]),
        ({"multi_gpu": True, "device": "cpu"}, {}, ["multi_gpu=true (from --multi_gpu)", "device=cpu (from --device)"]),
        ({"multi_gpu": True, "num_processes": 1}, {}, ["multi_gpu=true (from --multi_gpu)", "num_processes=1 (from --num_processes)"]),
        ({"module": True, "no_python": True}, {}, ["--module", "--no_python"]),
        ({"num_machines": 2, "main_process_port": 0}, {}, ["main_process_port=0 (from", "num_machines=2 (from"]),
    ],
)
def test_contradiction_names_both_sides(flags: dict[str, object], environ: dict[str, str], named: list[str]) -> None:
    """A contradiction names both sides."""
    with pytest.raises(ConfigError) as caught:
        resolve(flags=flags, environ=environ)
    assert all(entry in str(caught.value) for entry in named), str(caught.value)
    assert len(str(caught.value).splitlines()) == 2


@pytest.mark.parametrize(
    "flags",
    [
        {"cpu": True, "num_processes": 2},
        {"cpu": True, "gpu_ids": "all"},
        {"cpu": True, "device": "cpu"},
        {"cpu": False, "device": "xpu"},
        {"device": "xpu", "gpu_ids": "0,1"},
        {"num_processes": 2, "gpu_ids": "0,1"},
        {"num_processes": 4, "num_machines": 2, "gpu_ids": "0,1"},
        {"num_machines": 2, "machine_rank": 1},
        {"multi_gpu": True, "num_processes": 2},
        {"main_process_port": 0},
        {"module": True},
    ],
)
def test_compatible_options_accepted(flags: dict[str, object]) -> None:
    """What goes together is accepted."""
    assert set(resolve(flags=flags, environ={}).given()) == set(flags)


@given(st.integers(1, 64), st.integers(1, 8), st.integers(0, 8))
def test_processes_machines_rank(processes: int, machines: int, rank: int) -> None:
    """Processes machines and rank fit together or are refused."""
    flags = {"num_processes": processes, "num_machines": machines, "machine_rank": rank}
    try:
        resolve(flags=flags, environ={})
    except ConfigError:
        assert processes % machines or rank >= machines
    else:
        assert processes % machines == 0
        assert rank < machines


@given(st.integers(1, 64), st.integers(2, 8))
def test_suggested_process_count_accepted(processes: int, machines: int) -> None:
    """The suggested number of processes is accepted."""
    try:
        resolve(flags={"num_processes": processes, "num_machines": machines}, environ={})
    except ConfigError as error:
        suggested = int(str(error).rstrip(".").rsplit(" ", 1)[1])
        resolve(flags={"num_processes": suggested, "num_machines": machines}, environ={})


def test_script_argument_contradicts_launch() -> None:
    """An argument in the script that contradicts the launch is an error."""
    sent = resolved_config.dump(resolve(flags={"gpu_ids": "0,1"}, environ={}))
    with pytest.raises(ConfigError, match=r"gpu_ids=0,1 \(from --gpu_ids\) contradicts cpu=true \(from Accelerator\(cpu=...\)\)"):
        for_worker({"cpu": True}, {resolved_config.VARIABLE: sent})


@pytest.mark.parametrize(
    ("flags", "fine"),
    [
        ({"num_machines": 1}, True),
        ({"num_machines": 2}, False),
        ({"num_machines": 2, "main_process_ip": "node0"}, True),
        ({"num_machines": 2, "rdzv_backend": "c10d"}, False),
        ({"num_machines": 2, "rdzv_backend": "c10d", "rdzv_conf": "endpoint=node0:29400"}, True),
        ({"num_machines": 2, "rdzv_conf": "endpoint=node0:29400"}, False),
    ],
)
def test_machines_need_meeting_point(flags: dict[str, object], fine: bool) -> None:
    """Several machines need a place to meet when the launcher asks."""
    config = resolve(flags=flags, environ={})
    if fine:
        config.require_main_process()
    else:
        with pytest.raises(ConfigError, match=r"num_machines=2 \(from --num_machines\), but main_process_ip is not given"):
            config.require_main_process()


def test_device_ids() -> None:
    """Device ids."""
    assert (device_ids("3, 1"), device_ids("ALL"), device_ids(None)) == (["3", "1"], None, None)


@pytest.mark.parametrize(
    ("flags", "environ", "family"),
    [
        ({"device": "XPU"}, {}, "xpu"),
        ({"device": "cpu"}, {}, "cpu"),
        ({"cpu": True}, {}, "cpu"),
        ({"cpu": True}, {"SLIPSTREAM_DEVICE": "xpu"}, "cpu"),
        ({"device": "xpu"}, {"SLIPSTREAM_CPU": "1"}, "xpu"),
        ({}, {}, None),
    ],
)
def test_stronger_source_names_the_device(flags: dict[str, object], environ: dict[str, str], family: str | None) -> None:
    """Of `cpu` and `device` from different sources, the stronger source counts, in the launcher and in the workers."""
    config = resolve(flags=flags, environ=environ)
    assert config.device.family == family
    assert for_worker(environ={**environ, resolved_config.VARIABLE: resolved_config.dump(config)}).device.family == family


def test_call_chooses_the_device() -> None:
    """An argument of the call is stronger than the launcher's flag."""
    sent = {resolved_config.VARIABLE: resolved_config.dump(resolve(flags={"device": "xpu"}, environ={}))}
    assert for_worker({"cpu": True}, environ=sent).device.family == "cpu"
    assert for_worker({"device": "mps"}, environ=sent).device.family == "mps"


@pytest.mark.parametrize("text", ["xpu:0", "two words", "0", "-"])
def test_device_is_one_word(text: str) -> None:
    """What cannot name a family is refused, and a number is explained."""
    with pytest.raises(ConfigError, match=r"device=.* \(from --device\) is not the name of a device family") as caught:
        resolve(flags={"device": text}, environ={})
    assert ("gpu_ids says which devices" in str(caught.value)) is (":" in text)
