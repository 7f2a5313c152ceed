"""Budgets: as given, as measured, and spread evenly."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import nn

from slipstream.big_models.device_map import plan
from slipstream.big_models.device_map.plan import get_balanced_memory, get_max_memory, infer_auto_device_map
from slipstream.devices.memory import host_memory
from slipstream.devices.table import CPU, FAMILIES, Family
from slipstream.errors import ConfigError

NUMBERED = next(family for family in FAMILIES if family.indexed and family.plugin is None)
NAMED = next(family for family in FAMILIES if not family.indexed and family is not CPU)


def test_budget_order_and_bytes() -> None:
    """A budget is ordered and in bytes."""
    given = {"disk": "1TB", "cpu": "2GiB", NAMED.type: 5, 1: 0.5e3, 0: "0GB", f"{NUMBERED.type}:3": 7}
    found = get_max_memory(given)
    assert list(found.items()) == [(0, 0), (1, 500), (3, 7), (NAMED.type, 5), ("cpu", 2 * 2**30), ("disk", 10**12)]
    assert given["cpu"] == "2GiB"


@pytest.mark.parametrize("key", ["gpu0", -1, 1.5, True, None, "cpu:1", "disk:0", "meta", ""])
def test_what_is_no_device_is_named(key: Any) -> None:
    """What is not a device is named."""
    with pytest.raises(ConfigError, match="max_memory has .*not a device") as caught:
        get_max_memory({key: 100})
    assert repr(key) in str(caught.value)


@pytest.mark.parametrize("size", ["12 boxes", -1, None, float("nan"), float("inf"), True, "5Gb", "", "-3GB"])
def test_size_errors_name_device(size: Any) -> None:
    """What is not a size is named with its device."""
    with pytest.raises(ConfigError, match=r"max_memory\[1\]=") as caught:
        get_max_memory({0: 100, 1: size})
    assert repr(size) in str(caught.value)


def test_duplicate_device_refused() -> None:
    """A device named twice and what is not a dict are refused."""
    with pytest.raises(ConfigError, match="names device 0 twice"):
        get_max_memory({0: 1, f"{NUMBERED.type}:0": 2})
    with pytest.raises(ConfigError, match="is not a dict"):
        get_max_memory("10GiB")  # type: ignore[arg-type]


def test_default_budget_is_free_memory() -> None:
    """Without a budget it is what is free."""
    found = get_max_memory()
    assert found["cpu"] == pytest.approx(host_memory().available, rel=0.5)


def fake(family: Family, **functions: Any) -> Family:
    namespace = SimpleNamespace(is_available=lambda: True, device_count=lambda: 2, **functions)
    return replace(family, module=lambda: namespace, probe=lambda _: True)


def test_memory_shared_with_host() -> None:
    """An accelerator that takes its memory from the host's counts alone; the stand-in has its own (test_standin_dispatch.py)."""
    def free(device: Any) -> int | None:
        return {f"{NUMBERED.type}:0": 70, "cpu": 500, NAMED.type: 60}.get(str(device))

    integrated = fake(NUMBERED, get_device_properties=lambda _: SimpleNamespace(is_integrated=True))
    assert plan._measure_memory(integrated, free) == {0: 70}
    integrated = fake(NUMBERED, get_device_properties=lambda _: SimpleNamespace(is_integrated_gpu=True))
    assert plan._measure_memory(integrated, free) == {0: 70}
    assert plan._measure_memory(fake(NAMED, recommended_max_memory=lambda: 60), free) == {NAMED.type: 60}


def layers(sizes: list[int]) -> nn.Module:
    return nn.ParameterList(nn.Parameter(torch.empty(size, dtype=torch.uint8, device="meta"), requires_grad=False) for size in sizes)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 20), min_size=1, max_size=9), st.integers(1, 4))
def test_largest_share_is_minimal(sizes: list[int], devices: int) -> None:
    """The largest share is as small as it can be."""
    model = nn.ModuleList(layers([size]) for size in sizes)
    budget = get_balanced_memory(model, {device: 1000 for device in range(devices)})
    held = infer_auto_device_map(model, budget).held

    def smallest(left: list[int], rooms: int) -> int:
        if rooms == 1:
            return sum(left)
        return min(max(sum(left[:cut]), smallest(left[cut:], rooms - 1)) for cut in range(len(left) + 1))

    assert max(held.values()) == smallest(sizes, devices)


def test_shares_use_all_devices() -> None:
    """Shares are spread over all devices."""
    model = nn.ModuleList(layers([10]) for _ in range(5))
    assert get_balanced_memory(model, {0: 99, 1: 99, 2: 99, 3: 99, "cpu": 7}) == {0: 20, 1: 10, 2: 10, 3: 99, "cpu": 7}
    assert get_balanced_memory(model, {0: 99, 1: 12, 2: 99, "cpu": 7}) == {0: 20, 1: 10, 2: 99, "cpu": 7}


def test_low_zero_spares_device_0() -> None:
    """Low zero leaves device 0 what the others cannot hold."""
    model = nn.ModuleList(layers([10]) for _ in range(5))
    assert get_balanced_memory(model, {0: 99, 1: 99, 2: 99}, low_zero=True) == {0: 0, 1: 30, 2: 99}
    assert get_balanced_memory(model, {0: 99, 1: 25, 2: 15}, low_zero=True) == {0: 20, 1: 25, 2: 15}
    assert get_balanced_memory(model, {0: 99}, low_zero=True) == {0: 99}


def test_unbalanced_budget_unchanged() -> None:
    """A budget is returned where there is nothing to balance."""
    model = nn.ModuleList(layers([10]) for _ in range(5))
    assert get_balanced_memory(model, {"cpu": "1KB"}) == {"cpu": 1000}
    assert get_balanced_memory(model, {0: 0, "cpu": 30}) == {0: 0, "cpu": 30}
    assert get_balanced_memory(model, {0: 20, 1: 20, "cpu": 30}) == {0: 20, 1: 20, "cpu": 30}


def test_classes_and_types_count() -> None:
    """Classes and types count."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)) for _ in range(3)))
    assert get_balanced_memory(model, {0: 999, 1: 999})[0] == 48
    model = nn.ModuleDict({str(number): child for number, child in enumerate(model)})
    assert get_balanced_memory(model, {0: 999, 1: 999}, no_split_module_classes="Sequential")[0] == 64
    assert get_balanced_memory(model, {0: 999, 1: 999}, dtype="float16")[0] == 24
