"""Memory: what is left, what is given back, and what an out-of-memory error looks like."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path

import psutil
import pytest
import torch
from fakes import FakeMetal, FakeNamespace, fake

from slipstream.devices import memory, table
from slipstream.devices.memory import (
    allocator_statistics,
    available_cores,
    available_memory,
    clear_after_failure,
    clear_device_cache,
    convert_bytes,
    host_memory,
    release_memory,
    should_reduce_batch_size,
)


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        torch.OutOfMemoryError("Tried to allocate"),
        RuntimeError("MPS backend out of memory (MPS allocated: 0 bytes, max allowed: 242.48 MiB). Tried to allocate 256.00 MiB"),
        RuntimeError("Invalid buffer size: 19.38 GiB"),
        RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate(handle)"),
        RuntimeError("cuDNN error: CUDNN_STATUS_NOT_SUPPORTED."),
        RuntimeError("XPU out of memory. Tried to allocate"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:119] DefaultCPUAllocator: can't allocate memory: you tried to allocate"),
    ],
    ids=str,
)
def test_memory_error_recognised(error: Exception) -> None:
    """An error about memory is recognised."""
    assert should_reduce_batch_size(error)


@pytest.mark.parametrize("error", [RuntimeError("shape mismatch"), ValueError("CUDA out of memory."), KeyError("out of memory")], ids=str)
def test_other_errors_not_memory(error: Exception) -> None:
    """Other errors are left alone."""
    assert not should_reduce_batch_size(error)


def test_allocator_error_recognised() -> None:
    """What the allocator of this machine raises is recognised."""
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**50)
    assert should_reduce_batch_size(caught.value)


def test_released_objects_gone() -> None:
    """Released objects are gone."""
    class Thing:
        pass

    thing = Thing()
    thing.itself = thing  # type: ignore[attr-defined]
    reference = weakref.ref(thing)
    gc.disable()
    try:
        (thing,) = release_memory(thing)  # type: ignore[assignment]
        assert thing is None
        clear_device_cache(garbage_collection=True)
        assert reference() is None
    finally:
        gc.enable()


def test_cache_emptied_where_used() -> None:
    """The cache is emptied where devices were used."""
    used, unused, metal = FakeNamespace(initialised=True), FakeNamespace(), FakeMetal()
    clear_device_cache(families=(fake("cuda", used), fake("xpu", unused), fake("mps", metal), table.CPU))
    assert used.calls == [("empty_cache",)]
    assert unused.calls == []
    assert metal.emptied == 1


class FailedQueues(FakeNamespace):
    """A device whose queues have failures to report."""

    failures = 2

    def empty_cache(self) -> None:
        if self.failures:
            self.failures -= 1
            raise RuntimeError("Connection closed by peer")
        super().empty_cache()


def test_late_failures_dropped() -> None:
    """Work that failed late is dropped where it is expected, so that the cache is emptied; anything else is raised."""
    device = FailedQueues(initialised=True)
    clear_after_failure(lambda error: "closed by peer" in str(error), families=(fake("cuda", device),))
    assert device.calls == [("empty_cache",)]
    with pytest.raises(RuntimeError, match="closed by peer"):
        clear_after_failure(lambda error: False, families=(fake("cuda", FailedQueues(initialised=True)),))


def test_free_device_memory() -> None:
    """Free device memory is asked of the namespace."""
    assert memory._free_on(fake("cuda", FakeNamespace(free=7)), "cuda:0") == 7
    assert memory._free_on(fake("mps", FakeMetal()), "mps") == 30
    assert memory._free_on(fake("npu", object()), "npu:0") is None


def test_cpu_memory_is_host_memory() -> None:
    """The processor has what the host has left."""
    free = available_memory("cpu")
    assert free is not None
    assert 0 < free <= psutil.virtual_memory().total


@pytest.mark.parametrize(("size", "text"), [(0, "0 bytes"), (1024, "1.0 KB"), (5 * 2**40, "5.0 TB"), (2**60, "1024.0 PB")])
def test_convert_bytes(size: int, text: str) -> None:
    """Sizes in words."""
    assert convert_bytes(size) == text


# --- control groups --------------------------------------------------------------------------------------------------------


def _version_two(root: Path, limit: str, used: int, cached: int = 0) -> Path:
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text("0::/job/step\n")
    group = root / "sys/fs/cgroup/job"
    (group / "step").mkdir(parents=True)
    (group / "memory.max").write_text(limit + "\n")
    (group / "memory.current").write_text(f"{used}\n")
    (group / "memory.stat").write_text(f"anon 5\ninactive_file {cached}\n")
    (group / "cpu.max").write_text("150000 100000\n")
    (group / "step/memory.max").write_text("max\n")
    (group / "step/memory.current").write_text("1\n")
    (group / "step/cpu.max").write_text("max 100000\n")
    return root


def test_outer_group_limit_counts(tmp_path: Path) -> None:
    """A limit of an outer group counts."""
    root = _version_two(tmp_path, limit="1000", used=700, cached=200)
    assert host_memory(root).limit == 1000
    assert host_memory(root).available == 500


def test_no_group_limit(tmp_path: Path) -> None:
    """No limit leaves what the host has."""
    root = _version_two(tmp_path, limit="max", used=700)
    found = host_memory(root)
    assert found.limit is None
    assert found.available > 2**20


def test_group_over_limit_has_nothing(tmp_path: Path) -> None:
    """A group over its limit has nothing left."""
    assert host_memory(_version_two(tmp_path, limit="1000", used=2000)).available == 0


def test_cgroup_version_one(tmp_path: Path) -> None:
    """The first version of control groups is read too."""
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("4:memory:/docker/abc\n3:cpu,cpuacct:/docker/abc\n0::/\n")
    memory_group, cpu_group = tmp_path / "sys/fs/cgroup/memory", tmp_path / "sys/fs/cgroup/cpu"
    memory_group.mkdir(parents=True)
    cpu_group.mkdir()
    (memory_group / "memory.limit_in_bytes").write_text("4000")
    (memory_group / "memory.usage_in_bytes").write_text("1000")
    (cpu_group / "cpu.cfs_quota_us").write_text("100000")
    (cpu_group / "cpu.cfs_period_us").write_text("100000")
    assert host_memory(tmp_path).available == 3000
    assert available_cores(tmp_path) == 1


def test_cgroup_one_unlimited(tmp_path: Path) -> None:
    """The old spelling of no limit is understood."""
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("4:memory:/\n")
    group = tmp_path / "sys/fs/cgroup/memory"
    group.mkdir(parents=True)
    (group / "memory.limit_in_bytes").write_text("9223372036854771712")
    (group / "memory.usage_in_bytes").write_text("1000")
    assert host_memory(tmp_path).limit is None


def test_cpu_quota_rounded_up(tmp_path: Path) -> None:
    """A quota of one and a half cores is two cores at most."""
    assert available_cores(_version_two(tmp_path, limit="max", used=1)) <= 2


def test_no_cgroup_uses_affinity(tmp_path: Path) -> None:
    """Without control groups the affinity counts."""
    assert available_cores(tmp_path) == len(psutil.Process().cpu_affinity())


def test_allocator_statistics() -> None:
    """Allocators tell what they can of devices that are in use."""
    class Counting(FakeNamespace):
        def memory_allocated(self, index: int) -> int:
            return 10 * index

        def max_memory_allocated(self, index: int) -> int:
            return 20 * index

        def memory_stats(self, index: int) -> dict[str, int]:
            return {"num_ooms": index, "active_bytes.all.current": 3}

    pooled, unused = Counting(initialised=True), Counting()
    families = (table.CPU, fake("cuda", pooled), fake("xpu", unused))
    assert allocator_statistics(families=families) == {"cuda:1": {"allocated": 10, "most_allocated": 20, "failures": 1}}
