"""Counts what everyday calls cost: collectives, bytes between processes, our modules and functions, tensors, system calls.

    python tests/counting.py        record the counts anew, in tests/counts.json; read the difference before you commit it

`CASES` are the calls, each by a function that prepares it and returns it. Every count is for one call, after calls that warm up. Counts of
system calls come from `strace`, in processes of their own; the others are taken on the pool of ranks.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, TensorDataset

import slipstream
from slipstream import Accelerator
from slipstream.observability.options import LedgerKwargs
from slipstream.utils import gather_object

RECORD = Path(__file__).with_name("counts.json")
PACKAGE = str(Path(slipstream.__file__).parent)
WARM_UP, CALLS = 12, 10
Counts = dict[str, float]
Call = Callable[[], Any]


# -- what is counted --------------------------------------------------------------------------------------------------


def training(steps: int = 1, plain: bool = False) -> Call:
    """Return an update of a small model, from the loader to `zero_grad`: prepared, or the same in plain PyTorch (on several ranks, DDP)."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(net.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10)
    loader = DataLoader(TensorDataset(torch.randn(1000, 8)), batch_size=2)
    if plain:
        return plain_update(replicated(net), optimizer, scheduler, iter(loader), steps)
    settles_later = LedgerKwargs(interval=3600.0)  # once per interval the ledger looks at its rows, between two steps
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=steps, kwargs_handlers=[settles_later])
    net, optimizer, loader, scheduler = accelerator.prepare(net, optimizer, loader, scheduler)
    batches = iter(loader)

    def update() -> None:
        for _ in range(steps):
            (x,) = next(batches)
            with accelerator.accumulate(net):
                accelerator.backward(net(x).square().mean())
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()

    return update


def replicated(net: torch.nn.Module) -> torch.nn.Module:
    return torch.nn.parallel.DistributedDataParallel(net) if torch.distributed.is_initialized() else net


def plain_update(net: Any, optimizer: Any, scheduler: Any, batches: Iterator[Any], steps: int) -> Call:
    def update() -> None:
        for number in range(1, steps + 1):
            (x,) = next(batches)
            with net.no_sync() if number < steps and hasattr(net, "no_sync") else nullcontext():
                loss = net(x).square().mean()
                (loss / steps if steps > 1 else loss).backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()

    return update


def gathering(given: Any) -> Call:
    accelerator = Accelerator(cpu=True)
    return lambda: accelerator.gather(given)


def gathering_objects() -> Call:
    Accelerator(cpu=True)
    given = [{"id": number, "text": "x" * 250} for number in range(64)]
    return lambda: gather_object(given)


def logging(folder: Path) -> Call:
    """Return a call that logs a loss to the local tracker, as it is in most scripts: a tensor and a number."""
    accelerator = Accelerator(cpu=True, project_dir=str(folder))
    accelerator.init_trackers("counts")
    values = {"loss": torch.tensor(0.5), "lr": 1e-3}
    return lambda: accelerator.log(values, step=7)


def saving(folder: Path) -> Call:
    """Return a save of a small model with its optimizer into a new folder each time."""
    accelerator = Accelerator(cpu=True)
    net = torch.nn.Linear(8, 8)
    accelerator.prepare(net, torch.optim.AdamW(net.parameters()))
    numbers = iter(range(1000))
    return lambda: accelerator.save_state(str(folder / f"checkpoint-{next(numbers)}"))


Make = Callable[[Path], Call]
CASES: dict[str, Make] = {
    "training step": lambda folder: training(),
    "update of 4 accumulated batches": lambda folder: training(4),
    "gather of a small tensor": lambda folder: gathering(torch.ones(16)),
    "gather of 20 small tensors": lambda folder: gathering({f"metric {number}": torch.ones(8) for number in range(20)}),
    "gather of 1 MiB": lambda folder: gathering(torch.ones(1 << 18)),
    "gather_object of 64 dicts of 250 characters": lambda folder: gathering_objects(),
    "log of a loss": logging,
    "wait_for_everyone": lambda folder: Accelerator(cpu=True).wait_for_everyone,
    "save_state": saving,
}
PLAIN: dict[str, Make] = {
    "training step": lambda folder: training(plain=True),
    "update of 4 accumulated batches": lambda folder: training(4, plain=True),
}
"""The same in plain PyTorch: only the tensors and system calls beyond it are counted."""
WAITS = "system calls and waits"
"""The name of the system calls on several ranks: one that has to wait for another asks the kernel more often."""
SAVES = ("fsync", "fdatasync", "rename", "renameat", "renameat2", "mkdir", "unlink")


# -- on the pool of ranks ---------------------------------------------------------------------------------------------


def count_case(make: Make, plain: Make | None, folder: Path) -> Counts:
    """Return the counts of one call on this rank, without system calls."""
    call = make(folder)
    for _ in range(WARM_UP):
        call()
    found = {**_communication(call), **_functions(call)}
    if not found["collectives of torch"]:  # gloo's threads may free memory while the profiler ends, which is then a segmentation fault
        found["tensors"] = _tensors(call) - (_tensors(plain(folder)) if plain else 0)
    return found


class _Collectives(TorchDispatchMode):
    """Counts the collectives of torch's process groups; what goes over our own sockets is in the bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += function.namespace == "c10d"
        return function(*args, **(kwargs or {}))


def _communication(call: Call) -> Counts:
    channel = Accelerator(cpu=True).state.channel()
    sequence, sent = getattr(channel, "sequence", 0), bytes_sent()
    with _Collectives() as collectives:
        for _ in range(CALLS):
            call()
    counts = {
        "guarded calls": getattr(channel, "sequence", 0) - sequence,
        "collectives of torch": collectives.count,
        "bytes": bytes_sent() - sent,
    }
    return {what: count / CALLS for what, count in counts.items()}


def bytes_sent() -> int:
    """Return the bytes that the TCP connections of this process have sent, without those to the rendezvous store (the heartbeat)."""
    store = int(os.environ.get("MASTER_PORT", "0"))
    return sum(sent for ports, sent in _tcp_connections() if store not in ports)


def _tcp_connections() -> Iterator[tuple[set[int], int]]:
    """Yield both ports of each connection, and the bytes that it has sent."""
    for name in os.listdir("/proc/self/fd"):
        try:
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(name))) as connection:
                if connection.family in (socket.AF_INET, socket.AF_INET6) and connection.type == socket.SOCK_STREAM:
                    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
                    sent, again = struct.unpack_from("=QQ", info, _BYTES_SENT)
                    yield {connection.getsockname()[1], connection.getpeername()[1]}, sent - again
        except OSError:
            continue  # it was closed meanwhile, or it listens


_BYTES_SENT = 200
"""Where `tcpi_bytes_sent` stands in Linux's `struct tcp_info`, followed by the bytes of those that were sent again."""


def _functions(call: Call) -> Counts:
    files: set[str] = set()
    calls = 0

    def note(frame: Any, event: str, argument: Any) -> None:
        nonlocal calls
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            files.add(frame.f_code.co_filename)
            calls += 1

    sys.setprofile(note)
    try:
        for _ in range(CALLS):
            call()
    finally:
        sys.setprofile(None)
    return {"modules entered": len(files), "calls of ours": calls / CALLS}


def _tensors(call: Call) -> float:
    """Return how often a call allocates memory of tensors."""
    for _ in range(WARM_UP):
        call()
    with torch.profiler.profile(profile_memory=True) as profile:
        for _ in range(CALLS):
            call()
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    return len([event for event in events if event.nbytes() > 0]) / CALLS


# -- under strace -----------------------------------------------------------------------------------------------------


def count_system_calls(ranks: int) -> dict[str, Counts]:
    """Return the system calls of each case, of the thread on rank 0; of a save, also what all threads and ranks do to the disk."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "strace"
        launch = ["-m", "slipstream", "launch", "--cpu", "--num_processes", str(ranks)] if ranks > 1 else []
        command = ["strace", "-f", "-qq", "-s", "64", "-o", str(log), sys.executable, *launch, __file__, "--calls", folder]
        subprocess.run(command, check=True, capture_output=True, timeout=100, env={**os.environ, "OMP_NUM_THREADS": "1"})
        return dict(_between_marks(log.read_text(errors="replace").splitlines()))


def make_calls(folder: Path) -> None:
    """Be the traced program: make all calls, between marks that `strace` sees."""
    accelerator = Accelerator(cpu=True)
    for kind, cases in (("ours", CASES), ("plain", PLAIN)):
        for name, make in cases.items():
            call = make(folder)
            for _ in range(WARM_UP):
                call()
            accelerator.wait_for_everyone()
            os.access(f"/counts/begin/{accelerator.process_index}/{kind}/{name}", os.F_OK)
            for _ in range(CALLS):
                call()
            os.access(f"/counts/end/{accelerator.process_index}/{kind}/{name}", os.F_OK)
            accelerator.wait_for_everyone()


MARK = re.compile(r'^(?P<thread>\d+) .*"/counts/(?P<edge>begin|end)/(?P<rank>\d+)/(?P<kind>ours|plain)/(?P<name>[^"]+)"')


def _between_marks(lines: list[str]) -> Iterator[tuple[str, Counts]]:
    marks: dict[tuple[str, str], list[tuple[int, re.Match[str]]]] = {}
    for index, line in enumerate(lines):
        if found := MARK.match(line):
            marks.setdefault((found["kind"], found["name"]), []).append((index, found))
    calls = {}
    for case, of_case in marks.items():
        start, end = (index for index, found in of_case if found["rank"] == "0")
        thread = next(found["thread"] for _, found in of_case if found["rank"] == "0")
        calls[case] = sum(line.startswith(f"{thread} ") for line in lines[start + 1 : end] if _name_of(line))
    for kind, name in marks:
        if kind == "ours":
            beyond = (calls[kind, name] - calls.get(("plain", name), 0)) / CALLS
            first, last = marks[kind, name][0][0], marks[kind, name][-1][0]
            changes = Counter(_name_of(line) for line in lines[first:last]) if name == "save_state" else Counter()
            several = len({found["rank"] for _, found in marks[kind, name]}) > 1
            yield name, {WAITS if several else "system calls": beyond, **{what: changes[what] / CALLS for what in SAVES if changes[what]}}


def _name_of(line: str) -> str:
    """Return the system call that a line begins; nothing where it ends one that was interrupted, or is about a signal."""
    name = line.partition(" ")[2].strip().partition("(")[0]
    return name if name.isidentifier() else ""


# -- the record -------------------------------------------------------------------------------------------------------

SLACK = {
    "modules entered": (0.0, 0),
    "tensors": (0.0, 0),
    "bytes": (0.01, 0),
    "calls of ours": (0.1, 0),
    "system calls": (0.25, 1),
    WAITS: (0.25, 4),
}
"""What may be less, and more by this share and this much: it depends on the version of Python or torch, or on how often a call has to wait.

The rest is exact.
"""


def growth(name: str, recorded: Counts, now: Counts) -> list[str]:
    """Return what does not fit the record, in words."""
    found = []
    for what in [*recorded, *(what for what in now if what not in recorded)]:
        before, after = recorded.get(what, 0.0), now.get(what, 0.0)
        share, more = SLACK.get(what, (0.0, 0))
        if after > before + abs(before) * share + more or (what not in SLACK and after < before):
            found.append(f"{name}: {what} {'grew' if after > before else 'shrank'} from {before:g} to {after:g}")
    return found


def title(name: str, ranks: int) -> str:
    return f"{name}, {ranks} process{'es' if ranks > 1 else ''}"


def has_strace() -> bool:
    """Return whether `strace` is there and may trace."""
    found = shutil.which("strace")
    return found is not None and subprocess.run([found, "-qq", "-o", os.devnull, "true"], capture_output=True).returncode == 0


def main() -> None:
    from slipstream.testing import ranks as pool

    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for size in (1, 2):
            traced = count_system_calls(size)
            with pool(size) as ranks:
                for name, make in CASES.items():
                    counts = ranks.run(count_case, make, PLAIN.get(name), Path(folder) / f"{size} {name}")[0]
                    found[title(name, size)] = {**counts, **traced[name]}
    RECORD.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    make_calls(Path(sys.argv[2])) if "--calls" in sys.argv else main()
