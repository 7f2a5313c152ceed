"""The stand-in accelerator: strict as a GPU, and right as the CPU."""

from __future__ import annotations

import ctypes
import os
import time

import pytest
import torch
import torch.distributed as dist


@pytest.fixture
def run(ranks):
    """`run(function, *args)`: on one rank that has the device."""
    return lambda function, *args: ranks(1, device="standin").run(function, *args)[0]


# --- memory -----------------------------------------------------------------------------------------------------------------


def touch_from_host(write: bool) -> None:
    tensor = torch.ones(3, device="standin:2")
    if write:
        ctypes.memset(tensor.data_ptr(), 0, 4)
    ctypes.string_at(tensor.data_ptr(), 4)


@pytest.mark.parametrize("write", [False, True])
def test_unreadable_memory(ranks, write):
    """A host that reads or writes memory of the device ends at once, and the device is named."""
    (outcome,) = ranks(1, device="standin").outcomes(touch_from_host, write)
    assert "SIGSEGV" in str(outcome.exit)
    assert "the host touched memory of standin:2" in outcome.output
    assert "touch_from_host" in outcome.output


def allocate_beyond_capacity() -> list:
    module = torch.get_device_module("standin")
    module.set_capacity(1_000_000, 1)
    kept = torch.empty(600_000, dtype=torch.uint8, device="standin:1")
    told = []
    try:
        torch.empty(600_000, dtype=torch.uint8, device="standin:1")
    except torch.OutOfMemoryError as error:
        told.append(str(error))
    used = module.memory_allocated(1)
    del kept
    again = torch.empty(900_000, dtype=torch.uint8, device="standin:1")  # the cached block is given back first
    peak = module.max_memory_allocated(1)
    free, total = module.mem_get_info(1)
    failures = module.memory_stats(1)["num_ooms"]
    module.set_capacity(4 * 2**30, 1)
    return [told, used, again.numel(), peak >= 900_000, total - free >= 900_000, total, failures]


def test_capacity(run):
    """Beyond the capacity there is torch.OutOfMemoryError with the figures; memory that was freed can be had again."""
    told, used, again, peak, taken, total, failures = run(allocate_beyond_capacity)
    assert told
    assert "standin:1 is out of memory: 600000 bytes were asked for" in told[0]
    assert "of 1000000 bytes" in told[0]
    assert 600_000 <= used < 601_000
    assert again == 900_000
    assert peak
    assert taken
    assert total == 1_000_000
    assert failures == 1


def reuse_freed_memory(record: bool) -> float:
    """Free a tensor into which another stream still copies, and take its memory for a new one."""
    module = torch.get_device_module("standin")
    module.set_delay(copies=0.1)
    source = torch.full((1000,), 7.0).pin_memory()
    target = torch.empty(1000, device="standin")
    side = module.Stream()
    with module.stream(side):
        target.copy_(source, non_blocking=True)
    if record:
        target.record_stream(side)
    del target
    fresh = torch.zeros(1000, device="standin")
    module.synchronize()
    module.set_delay(copies=0.0)
    return fresh.max().item()


def test_record_stream(run):
    """Memory that is freed while another stream uses it is overwritten, unless `record_stream` was called: as on a GPU."""
    assert run(reuse_freed_memory, True) == 0.0
    assert run(reuse_freed_memory, False) == 7.0


# --- streams ----------------------------------------------------------------------------------------------------------------


def read_too_early() -> list:
    module = torch.get_device_module("standin")
    module.set_delay(copies=0.1)
    there = torch.ones(3, device="standin")
    here = torch.zeros(3)
    here.copy_(there, non_blocking=True)
    early = here.tolist()
    module.synchronize()
    late = here.tolist()
    source = torch.ones(3).pin_memory()
    target = torch.empty(3, device="standin")
    target.copy_(source, non_blocking=True)
    source.fill_(5.0)  # the copy has not begun
    changed = target.tolist()
    pageable = torch.ones(3)
    target.copy_(pageable, non_blocking=True)
    pageable.fill_(5.0)
    kept = target.tolist()
    module.set_delay(copies=0.0)
    return [early, late, changed, kept]


def test_late_copies(run):
    """A copy that does not block completes late, in both directions; pinned memory is read then, other memory at once."""
    assert run(read_too_early) == [[0.0] * 3, [1.0] * 3, [5.0] * 3, [1.0] * 3]


def wait_for_streams() -> list:
    module = torch.get_device_module("standin")
    module.set_delay(copies=0.1)
    side, event = module.Stream(), module.Event()
    target = torch.zeros(3, device="standin")
    source = torch.ones(3).pin_memory()
    with module.stream(side):
        target.copy_(source, non_blocking=True)
        event.record()
    unordered = target.cpu().tolist()  # this stream does not know of the other
    pending = not event.query() and not side.query()
    event.wait()
    ordered = target.tolist()
    begin, end = (torch.Event(device="standin", enable_timing=True) for _ in range(2))
    begin.record()
    target.copy_(source, non_blocking=True)
    end.record()
    end.synchronize()
    module.set_delay(copies=0.0)
    return [unordered, pending, ordered, begin.elapsed_time(end)]


def test_streams_and_events(run):
    """A stream waits for another only if an event says so; events measure time on the device."""
    unordered, pending, ordered, milliseconds = run(wait_for_streams)
    assert (unordered, pending, ordered) == ([0.0] * 3, True, [1.0] * 3)
    assert milliseconds >= 100


def measure_with_module() -> list[bool]:
    module = torch.get_device_module("standin")
    begin, end = module.Event(enable_timing=True), module.Event(enable_timing=True)
    begin.record()
    end.record()
    module.synchronize()
    torch.accelerator.empty_host_cache()
    recorded = module.current_stream().record_event()
    events = [isinstance(event, module.Event) for event in (begin, recorded)]
    return [begin.elapsed_time(end) >= 0, torch.ones(1).pin_memory().is_pinned(), *events]


def test_events_of_the_module(run):
    """Events are made and compared as those of torch.cuda; the host's cache of pinned memory can be emptied."""
    assert run(measure_with_module) == [True] * 4


def overlap() -> tuple[list[str], bool]:
    module = torch.get_device_module("standin")
    module.set_delay(copies=0.05, kernels=0.05)
    weights = torch.ones(100).pin_memory()
    x = torch.ones(100, device="standin")
    module.start_log()
    with module.stream(module.Stream()):
        there = weights.to("standin", non_blocking=True)
    y = x + x
    module.synchronize()
    module.stop_log()
    entries = module.log()
    module.set_delay(copies=0.0, kernels=0.0)
    copy = next(entry for entry in entries if entry.kind == "to_device")
    kernel = next(entry for entry in entries if entry.name == "aten::add")
    assert (there.sum() + y.sum()).item() == 300
    return sorted({entry.kind for entry in entries}), copy.begin < kernel.end and kernel.begin < copy.end and copy.stream != kernel.stream


def test_log(run):
    """The log says what ran when: a copy on a side stream overlaps with a kernel."""
    assert run(overlap) == (["kernel", "to_device"], True)


def count() -> list[dict[str, int]]:
    module = torch.get_device_module("standin")
    found = []

    def measure(work) -> None:
        module.reset_counters()
        work()
        found.append({name: value for name, value in vars(module.counters()).items() if value and name != "kernels"})

    x = torch.arange(4.0, device="standin")
    measure(lambda: x + x)
    measure(lambda: x.sum().item())
    measure(lambda: torch.ones(4).to("standin"))
    measure(lambda: torch.ones(4).to("standin", non_blocking=True))
    measure(lambda: x[x > 1])
    measure(module.synchronize)
    return found


def test_counters(run):
    """Copies and synchronisations are counted, also the hidden ones."""
    assert run(count) == [
        {},
        {"copies_to_host": 1, "bytes_to_host": 4, "synchronizations": 1},
        {"copies_to_device": 1, "bytes_to_device": 16, "synchronizations": 1},
        {"copies_to_device": 1, "bytes_to_device": 16},
        {"synchronizations": 1},
        {"synchronizations": 1},
    ]


def profiled() -> float:
    x = torch.ones(100, 100, device="standin")
    with torch.autograd.profiler.profile(use_device="standin", use_kineto=False) as profile:
        x @ x
    return next(entry.device_time_total for entry in profile.key_averages() if entry.key == "aten::mm")


def test_profiler(run):
    """torch's profiler has times of the device, by events around each operator."""
    assert run(profiled) > 0


# --- values -----------------------------------------------------------------------------------------------------------------

MODULES = {
    "linear": (lambda: torch.nn.Linear(6, 3), (4, 6)),
    "convolution": (lambda: torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.MaxPool2d(2)), (2, 3, 8, 8)),
    "transposed": (lambda: torch.nn.ConvTranspose1d(3, 4, 3, groups=1), (2, 3, 8)),
    "attention": (lambda: torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), (2, 5, 8)),
    "dropout": (lambda: torch.nn.Sequential(torch.nn.Linear(6, 6), torch.nn.Dropout(0.5), torch.nn.LayerNorm(6), torch.nn.GELU()), (4, 6)),
}
RECURRENT = {"lstm": torch.nn.LSTM, "gru": torch.nn.GRU, "rnn": torch.nn.RNN}


def result_and_gradients(build, shape: tuple[int, ...], device: str, dtype: torch.dtype) -> list[torch.Tensor]:
    torch.manual_seed(3)
    module = build().to(dtype).to(device)
    x = torch.randn(shape, dtype=dtype).to(device).requires_grad_()
    torch.manual_seed(4)
    y = module(x)
    y = y[0] if isinstance(y, tuple) else y
    y.float().pow(2).sum().backward()
    everything = [y, x.grad, *(parameter.grad for parameter in module.parameters())]
    assert all(tensor.device.type == device for tensor in everything)
    return [tensor.detach().cpu() for tensor in everything]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", MODULES)
def test_equal_to_cpu(run, name, dtype):
    """Forward, backward and random numbers equal those of the CPU bit for bit."""
    build, shape = MODULES[name]
    there = run(result_and_gradients, build, shape, "standin", dtype)
    here = result_and_gradients(build, shape, "cpu", dtype)
    exact = name != "attention"  # the CPU has a kernel for all of it, which devices do not take
    assert all(torch.equal(a, b) if exact else torch.allclose(a, b, rtol=0.1, atol=0.1) for a, b in zip(here, there, strict=True))


@pytest.mark.parametrize("name", RECURRENT)
def test_recurrent(run, name):
    """Recurrent networks, for which devices have operators of their own, agree with the CPU."""
    arguments = (lambda: RECURRENT[name](3, 4, num_layers=2, bidirectional=True), (5, 2, 3))
    there = run(result_and_gradients, *arguments, "standin", torch.float64)
    here = result_and_gradients(*arguments, "cpu", torch.float64)
    assert all(torch.allclose(a, b) for a, b in zip(here, there, strict=True))


def draw() -> list:
    module = torch.get_device_module("standin")
    torch.manual_seed(5)
    host = torch.get_rng_state()
    drawn = torch.randn(3, device="standin")
    untouched = torch.equal(host, torch.get_rng_state())
    state = module.get_rng_state()
    first = torch.rand(4, device="standin")
    module.set_rng_state(state)
    again = torch.rand(4, device="standin")
    other = torch.randn(3, device="standin:1", generator=torch.Generator("standin:1").manual_seed(5))
    return [drawn.cpu(), untouched, torch.equal(first, again), torch.equal(drawn.cpu(), other.cpu())]


def test_random_numbers(run):
    """One seed gives the numbers of the CPU, from a state of the device's own that can be captured and restored."""
    drawn, untouched, again, other = run(draw)
    assert torch.equal(drawn, torch.randn(3, generator=torch.Generator().manual_seed(5)))
    assert untouched
    assert again
    assert other


def precisions() -> list:
    layer = torch.nn.Linear(4, 4).to("standin")
    x = torch.ones(2, 4, device="standin")
    found = []
    for dtype in (torch.float16, torch.bfloat16):
        with torch.autocast("standin", dtype=dtype):
            found += [layer(x).dtype == dtype, torch.nn.functional.softmax(layer(x), 0).dtype == torch.float32]
    scaler = torch.amp.GradScaler("standin", init_scale=4.0)
    optimizer = torch.optim.SGD(layer.parameters(), lr=1.0)
    before = layer.weight.detach().clone()
    scaler.scale(layer(x).sum() * float("inf")).backward()
    scaler.step(optimizer)
    scaler.update()
    return [*found, torch.equal(before, layer.weight), scaler.get_scale()]


def test_mixed_precision(run):
    """Autocast takes both half precisions, and a loss scaler skips a step that overflowed."""
    assert run(precisions) == [True, True, True, True, True, 2.0]


# --- mistakes ---------------------------------------------------------------------------------------------------------------

MISTAKES = {
    "host and device": (lambda: torch.ones(3, device="standin") + torch.ones(3), "on standin:0 and on cpu"),
    "two devices": (lambda: torch.ones(3, device="standin:0") @ torch.ones(3, device="standin:1"), "standin:0 and on standin:1"),
    "no such device": (lambda: torch.ones(3, device="standin:7"), "there is no device standin:7: this process sees 4"),
    "generator": (lambda: torch.rand(3, device="standin", generator=torch.Generator()), "got a generator of cpu"),
    "sum on the host": (lambda: torch.zeros(()).add_(torch.ones((), device="standin")), "add_ got tensors on standin:0 and on cpu"),
    "result on the host": (lambda: torch.add(torch.ones((), device="standin"), 1, out=torch.empty(())), "on standin:0 and on cpu"),
    "host indexed": (lambda: torch.ones(3)[torch.tensor([1], device="standin")], "index got tensors on standin:0 and on cpu"),
    "host written by index": (lambda: torch.ones(3).index_put_((torch.tensor([1], device="standin"),), torch.ones(())), "and on cpu"),
    "host values by index": (lambda: torch.ones(3, device="standin").index_put_((torch.tensor([1]),), torch.ones(1)), "and on cpu"),
    "one position": (lambda: torch.ones(3, device="standin").index_select(0, torch.tensor(1)), "index_select got tensors on standin:0 and"),
    "one label": (lambda: torch.nn.functional.nll_loss(torch.ones(3, device="standin"), torch.tensor(1)), "nll_loss_forward got tensors"),
    "no such state": (lambda: torch.get_device_module("standin").get_rng_state(-1), "there is no device standin:-1"),
    "no such name": (lambda: torch.get_device_module("standin").get_device_name(9), "there is no device standin:9"),
    "delay": (lambda: torch.get_device_module("standin").set_delay(copies=-1.0), "copies=-1.0 is no delay"),
    "pinned": (lambda: torch.empty(3, device="standin", pin_memory=True), "only host memory can be pinned"),
    "numpy": (lambda: torch.ones(3, device="standin").numpy(), "can't convert standin:0 device type tensor"),
}


def fail(mistake) -> str:
    try:
        mistake()
    except (RuntimeError, TypeError, ValueError) as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes(run, name):
    """What a GPU refuses is refused, with the devices named."""
    mistake, message = MISTAKES[name]
    assert message in run(fail, mistake)


def mix_as_allowed() -> list[float]:
    x = torch.arange(4.0, device="standin")
    x[torch.tensor([0, 1])] = torch.tensor(5.0)
    x[1] = torch.tensor(7.0)
    return (torch.tensor(2.0) * x[torch.tensor([True, True, False, True])]).tolist()


def test_numbers_and_indices_of_the_host(run):
    """What a GPU takes from the host is taken: single numbers, and indices."""
    assert run(mix_as_allowed) == [10.0, 14.0, 6.0]


def fork_after_use() -> str:
    torch.ones(1, device="standin")
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(write, fail(lambda: torch.ones(1, device="standin")).encode())
        os._exit(0)
    os.waitpid(child, 0)
    text = os.read(read, 10_000).decode()
    os.close(read)
    os.close(write)
    return text


def test_fork_after_use(run):
    """A child that is forked after the device was used cannot use it, and says so."""
    assert "forked from one that had used the stand-in device" in run(fork_after_use)


# --- collectives ------------------------------------------------------------------------------------------------------------


def every_collective() -> dict[str, list]:
    from slipstream import PartialState

    state = PartialState()
    rank, size, device = state.process_index, state.num_processes, state.device
    torch.get_device_module("standin").set_delay(copies=0.01)
    mine = torch.arange(size, device=device, dtype=torch.float32) + 10 * rank
    found: dict[str, torch.Tensor] = {"all_reduce": mine.clone(), "broadcast": mine.clone(), "reduce": mine.clone()}
    dist.all_reduce(found["all_reduce"])
    dist.broadcast(found["broadcast"], 1)
    dist.reduce(found["reduce"], 0)
    gathered = [torch.empty_like(mine) for _ in range(size)]
    dist.all_gather(gathered, mine)
    found["all_gather"] = torch.stack(gathered)
    found["all_to_all"] = torch.empty_like(mine)
    dist.all_to_all_single(found["all_to_all"], mine)
    found["scatter"] = torch.empty(1, device=device)
    dist.scatter(found["scatter"], list(mine.split(1)) if rank == 0 else None, 0)
    found["ring"] = torch.empty_like(mine)
    works = [dist.isend(mine, (rank + 1) % size), dist.irecv(found["ring"], (rank - 1) % size)]
    for work in works:
        work.wait()
    dist.barrier()
    assert all(tensor.device == device for tensor in found.values())
    torch.get_device_module("standin").set_delay(copies=0.0)
    return {name: tensor.tolist() for name, tensor in found.items()}


def test_collectives(ranks):
    """Each collective gives what it should although it completes late, on the device of its rank."""
    first, second = ranks(2, device="standin").run(every_collective)
    assert first["all_reduce"] == second["all_reduce"] == [10.0, 12.0]
    assert first["broadcast"] == second["broadcast"] == [10.0, 11.0]
    assert first["reduce"] == [10.0, 12.0]
    assert first["all_gather"] == second["all_gather"] == [[0.0, 1.0], [10.0, 11.0]]
    assert (first["all_to_all"], second["all_to_all"]) == ([0.0, 10.0], [1.0, 11.0])
    assert (first["scatter"], second["scatter"]) == ([0.0], [1.0])
    assert (first["ring"], second["ring"]) == ([10.0, 11.0], [0.0, 1.0])


def late_collective() -> tuple[float, bool]:
    from slipstream import PartialState

    state = PartialState()
    torch.get_device_module("standin").set_delay(copies=0.3)
    tensor = torch.ones(2, device=state.device)
    begun = time.monotonic()
    work = dist.all_reduce(tensor, async_op=True)
    work.wait()
    waited = time.monotonic() - begun
    total = tensor.sum().item()
    torch.get_device_module("standin").set_delay(copies=0.0)
    return waited, total == 4.0


def test_wait_orders_streams(ranks):
    """`wait` on a collective makes the stream wait, not the host; the value is right when it is read."""
    for waited, right in ranks(2, device="standin").run(late_collective):
        assert waited < 0.25
        assert right


def use_closed_group() -> str:
    from slipstream import PartialState

    state = PartialState()
    group = dist.new_group(backend="standin")
    tensor = torch.ones(2, device=state.device)
    dist.all_reduce(tensor, group=group)
    total = tensor.sum().item()
    assert total == 4.0
    group.abort()
    return fail(lambda: dist.all_reduce(tensor, group=group))


def test_closed_group(ranks):
    """A collective in a group that was aborted is an error at the call; it does not look done."""
    assert all("aborted or shut down" in text for text in ranks(2, device="standin").run(use_closed_group))
