"""The device table: rows, choice, devices, and counting without torch."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from fakes import FakeMetal, FakeNamespace, fake
from hypothesis import given, strategies as st

from slipstream.devices import table
from slipstream.devices.count import count_without_torch
from slipstream.devices.table import (
    CPU,
    FAMILIES,
    DistributedType,
    RNGType,
    best_family,
    device_file_counter,
    device_for,
    family_of,
    torch_namespace,
    visible_count,
)
from slipstream.errors import ConfigError, StateError

ACCELERATORS = [family for family in FAMILIES if family is not CPU]


def test_import_without_torch() -> None:
    """Importing the table imports no torch."""
    code = "import sys, slipstream.devices.count as c; c.count_without_torch({}); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_order_of_rows() -> None:
    """The order is the documented one."""
    assert table.family_types() == ("standin", "mps", "mlu", "sdaa", "musa", "npu", "hpu", "cuda", "xpu", "neuron", "xla", "cpu")


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.type)
def test_rows_have_public_names(family: table.Family) -> None:
    """Every row names a distributed type and a random stream."""
    assert family.multi in DistributedType
    assert family.type in RNGType or family is CPU or family.on_request
    assert family.backend


@pytest.mark.parametrize("family", ACCELERATORS, ids=lambda family: family.type)
def test_shared_families_have_visible_variable(family: table.Family) -> None:
    """Every accelerator that several processes share can be narrowed."""
    assert family.visible or not family.many_per_host


def test_variables_belong_to_one_family() -> None:
    """No variable belongs to two families."""
    names = [name for family in FAMILIES for name in (family.visible, *family.also_visible) if name]
    assert len(names) == len(set(names))


def test_cpu_available_here() -> None:
    """Here the processor is there and counts one."""
    assert CPU.is_available()
    assert CPU.count() == 1
    assert CPU.backend == "gloo"


def test_first_available_family() -> None:
    """The first available family is taken."""
    rows = (fake("npu", FakeNamespace(available=False)), fake("cuda", FakeNamespace()), fake("xpu", FakeNamespace()), CPU)
    assert best_family(families=rows) is rows[1]
    assert best_family(cpu=True, families=rows) is CPU


def test_unshared_family_not_distributed() -> None:
    """A family that processes cannot share is left out of distributed runs."""
    rows = (fake("mps", FakeMetal()), CPU)
    assert best_family(families=rows).type == "mps"
    assert best_family(distributed=True, families=rows) is CPU


def test_no_device_falls_back_to_cpu() -> None:
    """Without any device the processor remains."""
    assert best_family(families=(fake("cuda", FakeNamespace(count=0)), fake("xpu", None))) is CPU


def test_local_ranks_wrap_around() -> None:
    """Local ranks wrap around the devices."""
    row = fake("cuda", FakeNamespace(count=2))
    assert [device_for(row, rank).index for rank in range(4)] == [0, 1, 0, 1]


def test_cpu_processes_share_device() -> None:
    """Processes on the processor share one device."""
    assert device_for(CPU, 5) == torch.device("cpu")


def test_override_wins() -> None:
    """An override wins."""
    assert device_for(CPU, 0, override="xpu:3") == torch.device("xpu", 3)


def test_unknown_override() -> None:
    """An override that torch does not know is an error with the choices."""
    with pytest.raises(ConfigError, match=r"'gpu'.*cuda"):
        device_for(CPU, 0, override="gpu")


def test_no_devices_names_variable() -> None:
    """A family without devices says which variable may hide them."""
    with pytest.raises(StateError, match="CUDA_VISIBLE_DEVICES"):
        device_for(fake("cuda", FakeNamespace(count=0)), 0)


def test_set_device_calls_namespace(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set device reaches the namespace."""
    namespace = FakeNamespace()
    monkeypatch.setattr(table, "FAMILIES", (fake("cuda", namespace), fake("mps", FakeMetal()), CPU))
    table.set_device(torch.device("cuda", 1))
    table.set_device(torch.device("mps"))
    table.set_device(torch.device("cpu"))
    assert namespace.calls == [("set_device", 1)]


def test_family_of() -> None:
    """Family of takes devices and their names."""
    assert family_of(torch.device("cuda", 1)).type == "cuda"
    assert family_of("npu:3").type == "npu"
    with pytest.raises(StateError, match="meta"):
        family_of("meta")


def test_absent_plugin_not_imported() -> None:
    """A plugin that is not imported is not imported to ask."""
    row = replace(family_of("npu"), module=lambda: pytest.fail("asked"), plugin="no_such_plugin")
    assert not row.may_be_used()


def test_missing_plugin_no_namespace() -> None:
    """A plugin that is not installed has no namespace."""
    assert torch_namespace("npu", "no_such_plugin")() is None
    assert family_of("npu").count() == 0


def test_broken_plugin_warns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A broken plugin is reported and not used."""
    (tmp_path / "broken_device_plugin.py").write_text("raise OSError('libdriver.so: cannot open')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.warns(UserWarning, match="broken_device_plugin.*libdriver"):
        assert torch_namespace("broken", "broken_device_plugin")() is None


def test_refusing_driver_not_available(monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver that refuses counts as not available."""
    class Refusing(FakeNamespace):
        def is_available(self) -> bool:
            raise RuntimeError("driver too old")

    monkeypatch.setattr(table, "FAMILIES", (fake("npu", Refusing()), fake("mlu", FakeNamespace(count=0)), CPU))
    assert not table.is_npu_available()
    assert table.is_mlu_available()
    assert not table.is_mlu_available(check_device=True)


@pytest.mark.parametrize("kind", ["cuda", "mps", "xpu", "npu", "mlu", "hpu", "musa", "sdaa", "neuron", "torch_xla"])
def test_no_accelerator_here(kind: str) -> None:
    """Here no accelerator is available."""
    question = getattr(table, f"is_{kind}_available")
    assert question.__name__ == f"is_{kind}_available"
    assert question() is False


def test_bf16_asks_chosen_family(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bfloat16 is asked of the family that would be taken."""
    assert table.is_bf16_available()
    monkeypatch.setattr(table, "best_family", lambda families: fake("cuda", FakeNamespace(bf16=False)))
    assert not table.is_bf16_available()


def test_fp16_on_cpu() -> None:
    """Float16 runs on the processor."""
    assert table.is_fp16_available()


def test_xla_hardware_kinds() -> None:
    """XLA can be asked for one kind of hardware only."""
    with pytest.raises(ConfigError, match="check_is_tpu"):
        table.is_torch_xla_available(check_is_tpu=True, check_is_gpu=True)


# --- without torch -------------------------------------------------------------------------------------------------------


def _cuda_without_build() -> table.Family:
    return replace(family_of("cuda"), builds=("",))  # this torch is a processor-only build


def _with_gpus(root: Path, count: int) -> Path:
    for number in range(count):
        (root / f"proc/driver/nvidia/gpus/0000:0{number}:00.0").mkdir(parents=True)
    return root


def test_devices_counted_from_files(tmp_path: Path) -> None:
    """Devices are counted from their files."""
    row = _cuda_without_build()
    assert count_without_torch({}, root=_with_gpus(tmp_path, 4), families=(row, CPU)) == (row, 4)


@pytest.mark.parametrize(("value", "expected"), [("0,1", 2), ("", 0), ("-1", 0), ("0,1,2,3,4,5", 4), ("GPU-8a1c", 1)])
def test_visible_variable_limits_count(tmp_path: Path, value: str, expected: int) -> None:
    """The visible devices variable narrows the count."""
    row = _cuda_without_build()
    assert row.count_files({"CUDA_VISIBLE_DEVICES": value}, _with_gpus(tmp_path, 4)) == expected


def test_variable_without_devices(tmp_path: Path) -> None:
    """A variable without devices is no evidence."""
    assert count_without_torch({"CUDA_VISIBLE_DEVICES": "0,1"}, root=tmp_path, families=(_cuda_without_build(), CPU)) == (CPU, 0)


def test_torch_build_without_family(tmp_path: Path) -> None:
    """A build of torch without the family counts nothing."""
    family = family_of("cuda")
    assert not family.installed("2.13.0+cpu")
    assert not family.installed(None)
    assert family.installed("2.13.0+cu128")
    assert family.installed("2.13.0+rocm6.4")
    assert family.installed("2.13.0")
    assert not family_of("npu").installed("2.13.0")


def test_amd_devices_not_processors(tmp_path: Path) -> None:
    """AMD devices are told from processors."""
    for number, identifier in enumerate(["0", "51120", "51121"]):
        node = tmp_path / f"sys/class/kfd/kfd/topology/nodes/{number}"
        node.mkdir(parents=True)
        (node / "gpu_id").write_text(identifier + "\n")
    assert family_of("cuda").count_files({}, tmp_path) == 2
    assert family_of("cuda").count_files({"HIP_VISIBLE_DEVICES": "0"}, tmp_path) == 1


def test_intel_devices_by_vendor(tmp_path: Path) -> None:
    """Intel devices are told by their vendor."""
    for number, vendor in enumerate(["0x8086", "0x10de"]):
        device = tmp_path / f"sys/class/drm/renderD{128 + number}/device"
        device.mkdir(parents=True)
        (device / "vendor").write_text(vendor + "\n")
    assert family_of("xpu").count_files({}, tmp_path) == 1


def test_first_matching_pattern_counts(tmp_path: Path) -> None:
    """The first pattern that matches counts."""
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/neuron0").touch()
    assert device_file_counter("sys/cores/*", "dev/neuron[0-9]*")(tmp_path) == 1


@given(st.lists(st.integers(0, 15), max_size=8))
def test_visible_list(numbers: list[int]) -> None:
    """A list of numbers lets as many devices through."""
    assert visible_count(",".join(map(str, numbers))) == len(numbers)


@given(st.integers(0, 30), st.integers(0, 30))
def test_visible_range(first: int, length: int) -> None:
    """A range lets through what is in it."""
    assert visible_count(f"{first}-{first + length}") == length + 1


def test_enumerations_know_values() -> None:
    """Enumerations know their values."""
    assert "MULTI_GPU" in DistributedType
    assert "MULTI_TOASTER" not in DistributedType
    assert DistributedType.NO in DistributedType
    assert str(DistributedType.FSDP) == "FSDP"
    assert len(DistributedType.list()) == 14
    assert {"torch", "cuda", "generator"} <= set(RNGType.list())
