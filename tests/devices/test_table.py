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
from slipstream.devices.table import (
    CPU,
    FAMILIES,
    DistributedType,
    RNGType,
    best_family,
    count_without_torch,
    device_file_counter,
    device_for,
    family_of,
    torch_namespace,
    visible_count,
)
from slipstream.errors import ConfigError, StateError

ACCELERATORS = [family for family in FAMILIES if family is not CPU]


def test_importing_the_table_imports_no_torch() -> None:
    code = "import sys, slipstream.devices.table as t; t.count_without_torch({}); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_the_order_is_the_documented_one() -> None:
    assert table.family_types() == ("mps", "mlu", "sdaa", "musa", "npu", "hpu", "cuda", "xpu", "neuron", "xla", "cpu")


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.type)
def test_every_row_names_a_distributed_type_and_a_random_stream(family: table.Family) -> None:
    assert family.multi in DistributedType
    assert family.type in RNGType or family is CPU
    assert family.backend


@pytest.mark.parametrize("family", ACCELERATORS, ids=lambda family: family.type)
def test_every_accelerator_that_several_processes_share_can_be_narrowed(family: table.Family) -> None:
    assert family.visible or not family.many_per_host


def test_no_variable_belongs_to_two_families() -> None:
    names = [name for family in FAMILIES for name in (family.visible, *family.also_visible) if name]
    assert len(names) == len(set(names))


def test_here_the_processor_is_there_and_counts_one() -> None:
    assert CPU.is_available()
    assert CPU.count() == 1
    assert CPU.backend == "gloo"


def test_the_first_available_family_is_taken() -> None:
    rows = (fake("npu", FakeNamespace(available=False)), fake("cuda", FakeNamespace()), fake("xpu", FakeNamespace()), CPU)
    assert best_family(families=rows) is rows[1]
    assert best_family(cpu=True, families=rows) is CPU


def test_a_family_that_processes_cannot_share_is_left_out_of_distributed_runs() -> None:
    rows = (fake("mps", FakeMetal()), CPU)
    assert best_family(families=rows).type == "mps"
    assert best_family(distributed=True, families=rows) is CPU


def test_without_any_device_the_processor_remains() -> None:
    assert best_family(families=(fake("cuda", FakeNamespace(count=0)), fake("xpu", None))) is CPU


def test_local_ranks_wrap_around_the_devices() -> None:
    row = fake("cuda", FakeNamespace(count=2))
    assert [device_for(row, rank).index for rank in range(4)] == [0, 1, 0, 1]


def test_processes_on_the_processor_share_one_device() -> None:
    assert device_for(CPU, 5) == torch.device("cpu")


def test_an_override_wins() -> None:
    assert device_for(CPU, 0, override="xpu:3") == torch.device("xpu", 3)


def test_an_override_that_torch_does_not_know_is_an_error_with_the_choices() -> None:
    with pytest.raises(ConfigError, match=r"'gpu'.*cuda"):
        device_for(CPU, 0, override="gpu")


def test_a_family_without_devices_says_which_variable_may_hide_them() -> None:
    with pytest.raises(StateError, match="CUDA_VISIBLE_DEVICES"):
        device_for(fake("cuda", FakeNamespace(count=0)), 0)


def test_set_device_reaches_the_namespace(monkeypatch: pytest.MonkeyPatch) -> None:
    namespace = FakeNamespace()
    monkeypatch.setattr(table, "FAMILIES", (fake("cuda", namespace), fake("mps", FakeMetal()), CPU))
    table.set_device(torch.device("cuda", 1))
    table.set_device(torch.device("mps"))
    table.set_device(torch.device("cpu"))
    assert namespace.calls == [("set_device", 1)]


def test_family_of_takes_devices_and_their_names() -> None:
    assert family_of(torch.device("cuda", 1)).type == "cuda"
    assert family_of("npu:3").type == "npu"
    with pytest.raises(StateError, match="meta"):
        family_of("meta")


def test_a_plugin_that_is_not_imported_is_not_imported_to_ask() -> None:
    row = replace(family_of("npu"), module=lambda: pytest.fail("asked"), plugin="no_such_plugin")
    assert not row.may_be_used()


def test_a_plugin_that_is_not_installed_has_no_namespace() -> None:
    assert torch_namespace("npu", "no_such_plugin")() is None
    assert family_of("npu").count() == 0


def test_a_broken_plugin_is_reported_and_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken_device_plugin.py").write_text("raise OSError('libdriver.so: cannot open')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.warns(UserWarning, match="broken_device_plugin.*libdriver"):
        assert torch_namespace("broken", "broken_device_plugin")() is None


def test_a_driver_that_refuses_counts_as_not_available(monkeypatch: pytest.MonkeyPatch) -> None:
    class Refusing(FakeNamespace):
        def is_available(self) -> bool:
            raise RuntimeError("driver too old")

    monkeypatch.setattr(table, "FAMILIES", (fake("npu", Refusing()), fake("mlu", FakeNamespace(count=0)), CPU))
    assert not table.is_npu_available()
    assert table.is_mlu_available()
    assert not table.is_mlu_available(check_device=True)


@pytest.mark.parametrize("kind", ["cuda", "mps", "xpu", "npu", "mlu", "hpu", "musa", "sdaa", "neuron", "torch_xla"])
def test_here_no_accelerator_is_available(kind: str) -> None:
    question = getattr(table, f"is_{kind}_available")
    assert question.__name__ == f"is_{kind}_available"
    assert question() is False


def test_bfloat16_is_asked_of_the_family_that_would_be_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    assert table.is_bf16_available()
    monkeypatch.setattr(table, "best_family", lambda families: fake("cuda", FakeNamespace(bf16=False)))
    assert not table.is_bf16_available()


def test_float16_runs_on_the_processor() -> None:
    assert table.is_fp16_available()


def test_xla_can_be_asked_for_one_kind_of_hardware_only() -> None:
    with pytest.raises(ConfigError, match="check_is_tpu"):
        table.is_torch_xla_available(check_is_tpu=True, check_is_gpu=True)


# --- without torch -------------------------------------------------------------------------------------------------------


def _cuda_without_build() -> table.Family:
    return replace(family_of("cuda"), builds=("",))  # this torch is a processor-only build


def _with_gpus(root: Path, count: int) -> Path:
    for number in range(count):
        (root / f"proc/driver/nvidia/gpus/0000:0{number}:00.0").mkdir(parents=True)
    return root


def test_devices_are_counted_from_their_files(tmp_path: Path) -> None:
    row = _cuda_without_build()
    assert count_without_torch({}, root=_with_gpus(tmp_path, 4), families=(row, CPU)) == (row, 4)


@pytest.mark.parametrize(("value", "expected"), [("0,1", 2), ("", 0), ("-1", 0), ("0,1,2,3,4,5", 4), ("GPU-8a1c", 1)])
def test_the_visible_devices_variable_narrows_the_count(tmp_path: Path, value: str, expected: int) -> None:
    row = _cuda_without_build()
    assert row.count_files({"CUDA_VISIBLE_DEVICES": value}, _with_gpus(tmp_path, 4)) == expected


def test_a_variable_without_devices_is_no_evidence(tmp_path: Path) -> None:
    assert count_without_torch({"CUDA_VISIBLE_DEVICES": "0,1"}, root=tmp_path, families=(_cuda_without_build(), CPU)) == (CPU, 0)


def test_a_build_of_torch_without_the_family_counts_nothing(tmp_path: Path) -> None:
    family = family_of("cuda")
    assert not family.installed("2.13.0+cpu")
    assert not family.installed(None)
    assert family.installed("2.13.0+cu128")
    assert family.installed("2.13.0+rocm6.4")
    assert family.installed("2.13.0")
    assert not family_of("npu").installed("2.13.0")


def test_amd_devices_are_told_from_processors(tmp_path: Path) -> None:
    for number, identifier in enumerate(["0", "51120", "51121"]):
        node = tmp_path / f"sys/class/kfd/kfd/topology/nodes/{number}"
        node.mkdir(parents=True)
        (node / "gpu_id").write_text(identifier + "\n")
    assert family_of("cuda").count_files({}, tmp_path) == 2
    assert family_of("cuda").count_files({"HIP_VISIBLE_DEVICES": "0"}, tmp_path) == 1


def test_intel_devices_are_told_by_their_vendor(tmp_path: Path) -> None:
    for number, vendor in enumerate(["0x8086", "0x10de"]):
        device = tmp_path / f"sys/class/drm/renderD{128 + number}/device"
        device.mkdir(parents=True)
        (device / "vendor").write_text(vendor + "\n")
    assert family_of("xpu").count_files({}, tmp_path) == 1


def test_the_first_pattern_that_matches_counts(tmp_path: Path) -> None:
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/neuron0").touch()
    assert device_file_counter("sys/cores/*", "dev/neuron[0-9]*")(tmp_path) == 1


@given(st.lists(st.integers(0, 15), max_size=8))
def test_a_list_of_numbers_lets_as_many_devices_through(numbers: list[int]) -> None:
    assert visible_count(",".join(map(str, numbers))) == len(numbers)


@given(st.integers(0, 30), st.integers(0, 30))
def test_a_range_lets_through_what_is_in_it(first: int, length: int) -> None:
    assert visible_count(f"{first}-{first + length}") == length + 1


def test_enumerations_know_their_values() -> None:
    assert "MULTI_GPU" in DistributedType
    assert "MULTI_TOASTER" not in DistributedType
    assert DistributedType.NO in DistributedType
    assert str(DistributedType.FSDP) == "FSDP"
    assert len(DistributedType.list()) == 14
    assert {"torch", "cuda", "generator"} <= set(RNGType.list())
