"""The device family that an option names: used, or an error that says why not; and a family that is there on request only."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from slipstream import PartialState
from slipstream.devices import table
from slipstream.devices.count import count_without_torch, launch_facts
from slipstream.devices.table import CPU, best_family, choose_family, default_family, family_of, named_family
from slipstream.errors import ConfigError

STANDIN = family_of("standin")
GIVEN = "device=it (from --device)"


def test_named_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU can be named by an argument, by a variable, and by the option cpu."""
    assert PartialState(device="cpu").device.type == "cpu"
    monkeypatch.setenv("SLIPSTREAM_DEVICE", "cpu")
    assert default_family() is CPU
    assert choose_family(None) is best_family()


def test_unknown_family_with_list() -> None:
    """A family that does not exist is refused with the list of those that do."""
    with pytest.raises(ConfigError, match=r"device=gpu \(from PartialState\(device=...\)\): there is no such device family") as caught:
        PartialState(device="gpu")
    assert all(kind in str(caught.value) for kind in table.family_types())
    with pytest.raises(ConfigError, match="'gpu': there is no such device family"):
        named_family("gpu")


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("cuda", "torch .* is a build without it" if torch.version.cuda is None else "torch sees no such device .*"),
        ("npu", "the package torch_npu is not installed"),
        ("hpu", "the package habana_frameworks is not installed"),
        ("mps", "torch sees no such device"),
    ],
)
def test_family_that_is_not_here(kind: str, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A family that torch cannot use here is an error with the reason, never another device."""
    with pytest.raises(ConfigError, match=rf"{GIVEN.replace('(', '[(]').replace(')', '[)]')} cannot be used here: {why}.\nLeave it out"):
        choose_family(kind, GIVEN)
    monkeypatch.setenv("SLIPSTREAM_DEVICE", kind)
    with pytest.raises(ConfigError, match=f"device={kind} [(]from SLIPSTREAM_DEVICE[)] cannot be used here"):
        default_family()


def test_driver_that_refuses() -> None:
    """What the driver says is the reason."""
    def refuse(_: object) -> bool:
        raise RuntimeError("no permission")

    row = replace(family_of("xpu"), module=object, probe=refuse)
    assert row.obstacle() == "torch.xpu says: no permission"


def test_family_that_processes_cannot_share() -> None:
    """A family whose devices several processes cannot share is refused for several."""
    with pytest.raises(ConfigError, match="several processes cannot share"):
        choose_family("mps", distributed=True)


def test_inert_until_named() -> None:
    """The stand-in is not there, not counted and not imported until it is named, in a process that has torch and an Accelerator."""
    code = """
import sys
from slipstream import Accelerator
from slipstream.devices.count import count_without_torch
from slipstream.devices.memory import allocator_statistics, clear_device_cache
from slipstream.devices.rng import default_kinds
from slipstream.devices.table import best_family, family_of
assert Accelerator().device.type == best_family().type != "standin"
assert family_of("standin").module() is None and not family_of("standin").is_available()
clear_device_cache(), allocator_statistics()
assert "standin" not in default_kinds()
assert count_without_torch({})[0].type != "standin"
assert "slipstream.testing.standin" not in sys.modules and "slipstream.testing" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=100)


@pytest.mark.parametrize(
    ("environ", "count"),
    [
        ({}, 4),
        ({"SLIPSTREAM_STANDIN_DEVICES": "6"}, 6),
        ({"STANDIN_VISIBLE_DEVICES": "0,2"}, 2),
        ({"STANDIN_VISIBLE_DEVICES": ""}, 0),
        ({"SLIPSTREAM_STANDIN_DEVICES": "1", "STANDIN_VISIBLE_DEVICES": "0,1"}, 1),
    ],
)
def test_devices_declared(environ: dict[str, str], count: int) -> None:
    """Its devices are as many as the variables say, without torch."""
    assert count_without_torch(environ, "standin") == (STANDIN, count)


@pytest.mark.parametrize("text", ["0", "-1", "many", "2.5"])
def test_bad_number_of_devices(text: str) -> None:
    """A number of devices that cannot be is refused, with its variable."""
    with pytest.raises(ConfigError, match=f"SLIPSTREAM_STANDIN_DEVICES='{text}' is not a number of devices"):
        launch_facts({"SLIPSTREAM_STANDIN_DEVICES": text}, "standin", GIVEN)


def test_facts_for_the_launcher() -> None:
    """The launcher learns what to build, how many there are, and which variable limits them; of a build without the family, the error."""
    assert launch_facts({"STANDIN_VISIBLE_DEVICES": "3"}, "standin") == {
        "count": 1,
        "variable": "STANDIN_VISIBLE_DEVICES",
        "plugin": "slipstream.testing.standin",
        "total": 4,
        "total_variable": "SLIPSTREAM_STANDIN_DEVICES",
    }
    assert launch_facts({}, "cpu") == {"count": 0, "variable": None}
    with pytest.raises(ConfigError, match="cannot be used here: the package torch_mlu is not installed"):
        launch_facts({}, "mlu", GIVEN)


def test_group_for_both_memories() -> None:
    """A group of an accelerator has gloo for tensors of the host; families without numbered devices keep their one backend."""
    assert STANDIN.group_backend == "cpu:gloo,standin:standin"
    assert family_of("cuda").group_backend == "cpu:gloo,cuda:nccl"
    assert (CPU.group_backend, family_of("mps").group_backend, family_of("xla").group_backend) == ("gloo", "gloo", "xla")
