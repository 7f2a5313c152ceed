"""Random states: plain data, captured and put back exactly."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from fakes import FakeMetal, FakeNamespace, fake
from hypothesis import given, strategies as st

from slipstream.devices import rng, table
from slipstream.devices.rng import capture, fingerprint, restore, set_seed
from slipstream.errors import ConfigError


@pytest.fixture(autouse=True)
def _own_states() -> Iterator[None]:
    python, array, tensor = random.getstate(), numpy.random.get_state(), torch.get_rng_state()
    yield
    random.setstate(python)
    numpy.random.set_state(array)
    torch.set_rng_state(tensor)


def _draw() -> tuple[float, float, float, float]:
    return random.gauss(0, 1), random.random(), float(numpy.random.standard_normal()), float(torch.randn(1))


def _through_files(state: object) -> object:
    """The state as it would come back from JSON and tensors files."""
    if isinstance(state, torch.Tensor):
        return state.clone()
    if isinstance(state, dict) and any(isinstance(value, torch.Tensor | list) for value in state.values()):
        return {key: _through_files(value) for key, value in state.items()}
    return json.loads(json.dumps(state))


@given(st.integers(0, 2**64 - 1), st.integers(0, 3))
def test_restored_states_draw_same(seed: int, drawn: int) -> None:
    """Restored states draw the same numbers."""
    set_seed(seed)
    for _ in range(drawn):
        _draw()
    state = capture(["python", "numpy", "torch"])
    expected = [_draw() for _ in range(3)]
    assert restore(_through_files(state)) == ()
    assert [_draw() for _ in range(3)] == expected


@pytest.mark.parametrize("kind", ["python", "numpy", "torch"])
def test_one_kind_restored_alone(kind: str) -> None:
    """A kind is restored alone."""
    set_seed(1)
    state = capture([kind])
    first = _draw()
    restore(state)
    second = _draw()
    changed = {"python": (0, 1), "numpy": (2,), "torch": (3,)}
    same = changed[kind]
    assert all((first[position] == second[position]) == (position in same) for position in range(4))


def test_default_kinds_include_used_devices() -> None:
    """By default the states of used devices are included."""
    rows = (fake("cuda", FakeNamespace(initialised=True)), fake("xpu", FakeNamespace()), fake("mps", FakeMetal()), table.CPU)
    assert rng.default_kinds(rows) == ("python", "numpy", "torch", "cuda", "mps")
    assert list(capture(families=rows)) == ["python", "numpy", "torch", "cuda", "mps"]


def test_device_states_restored_each() -> None:
    """Device states are put back device by device."""
    namespace, metal = FakeNamespace(initialised=True), FakeMetal()
    rows = (fake("cuda", namespace), fake("mps", metal), table.CPU)
    state = capture(["cuda", "mps"], families=rows)
    namespace.states = [torch.full((4,), 9, dtype=torch.uint8)] * 2
    metal.state = torch.full((4,), 9, dtype=torch.uint8)
    assert restore(state, families=rows) == ()
    assert [int(held[0]) for held in namespace.states] == [0, 1]
    assert int(metal.state[0]) == 0


def test_missing_devices_named() -> None:
    """States of devices that are not here are named."""
    state = capture(["cuda", "torch"], families=(fake("cuda", FakeNamespace(initialised=True)), table.CPU))
    assert restore(state, families=(fake("cuda", FakeNamespace(count=0)), table.CPU)) == ("cuda",)
    by_number = {"cuda": state["cuda"]["states"]}  # does not tell which device was computed on
    assert restore(by_number, families=(fake("cuda", FakeNamespace(count=1)), table.CPU)) == ("cuda",)


@pytest.mark.parametrize(("saved_on", "devices", "here"), [(1, 2, 0), (0, 2, 1), (1, 1, 0)])
def test_state_follows_current_device(saved_on: int, devices: int, here: int) -> None:
    """The state of the device that a process computed on goes to the one that it computes on now, also with fewer devices."""
    saved = FakeNamespace(initialised=True, current=saved_on)
    state = capture(["cuda"], families=(fake("cuda", saved), table.CPU))
    now = FakeNamespace(count=devices, current=here, states=[torch.full((4,), 9, dtype=torch.uint8)] * devices)
    assert restore(state, families=(fake("cuda", now), table.CPU)) == ()
    assert int(now.states[here][0]) == saved_on


def test_fingerprint_of_current_device_first() -> None:
    """Processes that drew equally, each on its own device, have equal fingerprints."""
    drawn, fresh = torch.full((4,), 5, dtype=torch.uint8), torch.zeros(4, dtype=torch.uint8)
    first = FakeNamespace(initialised=True, current=0, states=[drawn, fresh])
    second = FakeNamespace(initialised=True, current=1, states=[fresh, drawn])
    prints = [fingerprint(["cuda"], families=(fake("cuda", namespace), table.CPU)) for namespace in (first, second)]
    assert prints[0] == prints[1]
    second.current = 0
    assert fingerprint(["cuda"], families=(fake("cuda", second), table.CPU)) != prints[0]


@pytest.mark.parametrize("state", [{"current": 2, "states": [torch.zeros(4)]}, {"current": "0", "states": []}, {"current": 0}, None])
def test_bad_device_state_refused(state: Any) -> None:
    """A state of devices without a list or a current device is refused."""
    with pytest.raises(ConfigError, match="not a random state of devices"):
        restore({"cuda": state}, families=(fake("cuda", FakeNamespace()), table.CPU))


def test_unknown_kind() -> None:
    """An unknown kind is an error."""
    with pytest.raises(ConfigError, match="'dice'.*python"):
        capture(["dice"])


def test_same_seed_same_numbers() -> None:
    """The same seed draws the same numbers."""
    set_seed(7)
    first = _draw()
    set_seed(7)
    assert _draw() == first


def test_device_specific_seed_by_rank() -> None:
    """Device specific seeds differ between ranks only."""
    assert set_seed(7, rank=3) == 7
    assert set_seed(7, device_specific=True, rank=3) == 10
    drawn = _draw()
    set_seed(10)
    assert _draw() == drawn


def test_large_seeds_differ_numpy() -> None:
    """Large seeds differ for numpy too."""
    set_seed(5)
    small = numpy.random.random()
    set_seed(5 + 2**32)
    assert numpy.random.random() != small


@pytest.mark.parametrize("seed", [-1, 2**64, 1.5, "3", True, None])
def test_bad_seed(seed: object) -> None:
    """A seed that is not one is an error."""
    with pytest.raises(ConfigError, match="seed"):
        set_seed(seed)  # type: ignore[arg-type]


def test_deterministic_passed_to_torch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Deterministic is passed to torch."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))  # torch imports its compiler here, which sets this if it is not set
    set_seed(1)
    assert not torch.are_deterministic_algorithms_enabled()
    set_seed(1, deterministic=True)
    try:
        assert torch.are_deterministic_algorithms_enabled()
    finally:
        torch.use_deterministic_algorithms(False)


def test_plugins_seeded_without_import() -> None:
    """Plugins are seeded and their absence is not an import."""
    namespace = FakeNamespace()
    set_seed(11, families=(fake("npu", namespace), table.CPU))
    assert namespace.calls == [("manual_seed_all", 11)]


@pytest.mark.parametrize("kind", ["python", "numpy", "torch"])
def test_fingerprint_follows_kind(kind: str) -> None:
    """A fingerprint follows its kind."""
    set_seed(3)
    before = {name: fingerprint([name]) for name in ("python", "numpy", "torch")}
    {"python": random.random, "numpy": numpy.random.random, "torch": lambda: torch.rand(1)}[kind]()
    after = {entry: fingerprint([entry]) for entry in before}
    assert [entry for entry in before if before[entry] != after[entry]] == [kind]


def test_fingerprint_sees_device_states() -> None:
    """A fingerprint sees the state of the device that is computed on: those of other processes' devices do not matter."""
    namespace = FakeNamespace(initialised=True)
    rows = (fake("cuda", namespace), table.CPU)
    before = fingerprint(families=rows)
    namespace.states[1] += 1
    assert fingerprint(families=rows) == before
    namespace.states[0] += 1
    assert fingerprint(families=rows) != before
    assert len(before) == 16


@pytest.mark.parametrize("change", [{"pos": 10**8}, {"pos": -1}, {"pos": "0"}, {"key": [1] * 623}, {"key": None}])
def test_bad_numpy_state_refused(change: dict[str, Any]) -> None:
    """A state of numpy that would read beyond its words is refused."""
    state = capture(["numpy"])
    state["numpy"]["state"].update(change)
    with pytest.raises(ConfigError, match="not a random state of numpy"):
        restore(state)


def test_states_of_each_device() -> None:
    """A family that reads one state at a time gives the state of every device, and each goes back to its own."""
    namespace = FakeNamespace()
    row = fake("sdaa", SimpleNamespace(
        is_available=namespace.is_available, device_count=namespace.device_count, set_rng_state=namespace.set_rng_state,
        get_rng_state=lambda index: namespace.states[index].clone(),
    ))
    state = rng.capture(["sdaa"], families=(row,))
    before = [tensor.clone() for tensor in namespace.states]
    namespace.states = [torch.full((4,), 9, dtype=torch.uint8)] * 2
    assert rng.restore(state, families=(row,)) == ()
    assert all(map(torch.equal, namespace.states, before))


def test_family_that_cannot_restore() -> None:
    """A family without a function to set states is reported as not restored."""
    row = fake("sdaa", SimpleNamespace(is_available=lambda: True, device_count=lambda: 1))
    assert rng.restore({"sdaa": [torch.zeros(4)]}, families=(row,)) == ("sdaa",)
