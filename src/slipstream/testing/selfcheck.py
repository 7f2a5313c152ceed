"""A job that checks itself: collectives, a mistake that must be reported, and a training run that must equal that of one process.

    slipstream test --cpu --num_processes 2                                     this machine or cluster, as a command
    slipstream launch --num_processes 2 -m slipstream.testing.selfcheck         the same as an ordinary job

Every process runs every check, on the device that the options choose; the main process prints the results of all and a last line for a
bug report, and `--report` also writes them as JSON. Exit code 1 if a check failed anywhere. It needs nothing but torch and leaves nothing
behind.
"""

from __future__ import annotations

import argparse
import json
import socket
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from slipstream.devices.table import family_of
from slipstream.distributed.state import PartialState
from slipstream.errors import DistributedOperationException
from slipstream.observability.run_dir.environment import device_name, software_line

__all__ = ["CHECKS", "SelfCheckResult", "main", "run"]

_STEPS = 5
_SAMPLES_PER_PROCESS = 4


class _Failed(Exception):
    """A check did not get what it expected."""


@dataclass(frozen=True)
class SelfCheckResult:
    """The result of one check, on this process or combined over all."""

    name: str
    text: str
    """What it saw, or what went wrong."""
    failed: bool
    seconds: float


def _expect(found: object, expected: object, what: str) -> None:
    if found != expected:
        raise _Failed(f"{what} gave {found!r} instead of {expected!r}")


def _on_device(state: PartialState, *values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32, device=state.device)


def _check_gather(state: PartialState) -> str:
    """Every rank is there once, and a nested structure comes back in the order of the ranks."""
    rank, world = state.process_index, state.num_processes
    found = state.gather({"rank": _on_device(state, rank), "pair": (_on_device(state, rank, -rank), [_on_device(state, 7)])})
    _expect(found["rank"].tolist(), [float(index) for index in range(world)], "gather of the ranks")
    _expect(found["pair"][0].tolist(), [float(value) for index in range(world) for value in (index, -index)], "gather of pairs")
    _expect(found["pair"][1][0].tolist(), [7.0] * world, "gather inside a list")
    return f"{world} of {world} ranks, each once and in order"


def _check_ragged(state: PartialState) -> str:
    """Processes may bring different numbers of rows, none included."""
    found = state.gather(torch.full((state.process_index, 2), float(state.process_index), device=state.device))
    expected = [[float(index)] * 2 for index in range(state.num_processes) for _ in range(index)]
    _expect(found.tolist(), expected, "gather of uneven rows")
    return f"0 to {state.num_processes - 1} rows"


def _check_reduce(state: PartialState) -> str:
    """Sums and means over the processes."""
    world = state.num_processes
    _expect(state.reduce(_on_device(state, state.process_index + 1)).tolist(), [world * (world + 1) / 2], "reduce to the sum")
    _expect(state.reduce(_on_device(state, 3, 5), reduction="mean").tolist(), [3.0, 5.0], "reduce to the mean")
    return "sum and mean"


def _check_broadcast(state: PartialState) -> str:
    """The last process's tensor on all of them."""
    found = state.broadcast(_on_device(state, state.process_index, 2), from_process=state.num_processes - 1)
    _expect(found.tolist(), [state.num_processes - 1.0, 2.0], "broadcast from the last process")
    return "from the last process to all"


def _check_objects(state: PartialState) -> str:
    """Text and records, in the order of the ranks."""
    rank, world = state.process_index, state.num_processes
    found = state.gather_object([f"text {rank}", {"rank": rank}])
    _expect(found, [item for index in range(world) for item in (f"text {index}", {"rank": index})], "gather of objects")
    _expect(state.broadcast_object_list([rank, "x"]), [0, "x"], "broadcast of objects")
    return "text and records, in order"


def _check_split(state: PartialState) -> str:
    """Work is shared out, and the results come back in the order of the input."""
    with state.split_between_processes(list(range(7)), apply_padding=True) as mine:
        found = state.gather(torch.tensor([value * value for value in mine], device=state.device))
    _expect(found.tolist(), [value * value for value in range(7)], "squares of a shared list")
    return "7 items, results in the order of the input"


def _check_turns(state: PartialState) -> str:
    """The main process comes first, and everyone waits for everyone."""
    with state.main_process_first():
        entered = time.time()
    state.wait_for_everyone()
    times = state.gather_object([entered])
    if times[0] > min(times) + 1.0:  # clocks of several machines may differ a little
        raise _Failed("another process went through main_process_first before the main process")
    return "the main process first, then everyone together"


def _check_mismatch(state: PartialState) -> str:
    """A mistake between processes is an error on every one of them, and the group works afterwards."""
    if not state.use_distributed:
        return "not applicable: one process"
    try:
        if state.is_main_process:
            state.gather(_on_device(state, 1))
        else:
            state.reduce(_on_device(state, 1))
    except DistributedOperationException:
        pass
    else:
        raise _Failed("process 0 called gather while others called reduce, and no error was raised")
    _check_reduce(state)
    return "an error on every process, and the group works afterwards"


def _check_reopen(state: PartialState) -> str:
    """After the process group was closed, the next call opens a fresh one."""
    state.destroy_process_group()
    _check_gather(state)
    return "closed, and open again at the next call"


def _check_training(state: PartialState) -> str:
    """Training on shares of a batch results in the weights of one process that trains on the whole batch."""
    here = _train(state, torch.nn.parallel.DistributedDataParallel if state.use_distributed else None)
    alone = _train(state, None)
    difference = max(float((entry - other).abs().max()) for entry, other in zip(here, alone, strict=True))
    if not difference < 1e-4:
        raise _Failed(f"after {_STEPS} steps the weights differ from those of one process by {difference:g}")
    return f"{_STEPS} steps, weights differ by {difference:.0e}"


def _train(state: PartialState, wrapper: Callable[..., nn.Module] | None) -> list[torch.Tensor]:
    """The weights after a few steps: on this process's share of each batch if wrapped, on all of it otherwise."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1234)
        model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))
        inputs = torch.randn(_STEPS, state.num_processes * _SAMPLES_PER_PROCESS, 6)
    model = model.to(state.device)
    inputs = inputs.to(state.device)
    indexed = wrapper is not None and family_of(state.device).indexed
    wrapped = model if wrapper is None else wrapper(model, device_ids=[state.device.index] if indexed else None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    first = state.process_index * _SAMPLES_PER_PROCESS
    for batch in inputs:
        share = batch if wrapper is None else batch[first : first + _SAMPLES_PER_PROCESS]
        optimizer.zero_grad()
        (wrapped(share) - share.sum(dim=1, keepdim=True)).square().mean().backward()
        optimizer.step()
    return [parameter.detach().cpu() for parameter in model.parameters()]


CHECKS: tuple[tuple[str, Callable[[PartialState], str]], ...] = (
    ("gather", _check_gather),
    ("gather of uneven rows", _check_ragged),
    ("reduce", _check_reduce),
    ("broadcast", _check_broadcast),
    ("objects", _check_objects),
    ("split and gather", _check_split),
    ("turns and barrier", _check_turns),
    ("a mistake is reported", _check_mismatch),
    ("training equals one process", _check_training),
    ("group reopens", _check_reopen),
)


def run(state: PartialState, checks: Sequence[tuple[str, Callable[[PartialState], str]]] = CHECKS) -> list[SelfCheckResult]:
    """Run the checks on this process. One that fails does not keep the others from running."""
    outcomes = []
    for name, check in checks:
        started = time.perf_counter()
        failed = False
        try:
            text = check(state)
        except Exception as error:  # any error is the result of the check
            failed, text = True, str(error) if isinstance(error, _Failed) else f"{type(error).__name__}: {error}"
        outcomes.append(SelfCheckResult(name, text, failed, time.perf_counter() - started))
    return outcomes


def _combine(state: PartialState, mine: list[SelfCheckResult]) -> list[SelfCheckResult]:
    """Combine the outcomes of all processes: problems by rank, and the longest time."""
    everyone: list[list[dict[str, Any]]] = state.gather_object([[asdict(outcome) for outcome in mine]])
    joined = []
    for position, outcome in enumerate(mine):
        rows = [SelfCheckResult(**entry[position]) for entry in everyone]
        problems = [f"rank {rank}: {row.text}" for rank, row in enumerate(rows) if row.failed]
        joined.append(SelfCheckResult(outcome.name, "\n".join(problems) or rows[0].text, bool(problems), max(row.seconds for row in rows)))
    return joined


def _as_text(outcomes: Sequence[SelfCheckResult]) -> str:
    lines = []
    for outcome in outcomes:
        first, *rest = outcome.text.splitlines() or [""]
        lines.append(f"  {'FAILED' if outcome.failed else 'ok':<6}  {outcome.name:<28} {outcome.seconds * 1000:8.1f} ms  {first}")
        lines += [" " * 51 + line for line in rest]
    return "\n".join(lines)


def _report(state: PartialState, outcomes: Sequence[SelfCheckResult], hosts: Sequence[str]) -> dict[str, Any]:
    failed = sum(outcome.failed for outcome in outcomes)
    return {
        "verdict": f"{failed} of {len(outcomes)} checks failed." if failed else f"All {len(outcomes)} checks passed: jobs can run here.",
        "processes": state.num_processes,
        "hosts": sorted(set(hosts)),
        "device": state.device.type,
        "backend": state.backend,
        "checks": [asdict(outcome) for outcome in outcomes],
        "summary": _summary(state, [outcome.name for outcome in outcomes if outcome.failed]),
    }


def _summary(state: PartialState, failed: Sequence[str]) -> str:
    """Return one line to paste into an issue: what worked where, or which checks did not."""
    where = f"{state.num_processes} x {state.device.type} ({device_name(state.device)}), {software_line()}"
    return f"did not work ({', '.join(failed)}) on {where}" if failed else f"worked on {where}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run every check on this process, report on the main process, and return the exit code."""
    parser = argparse.ArgumentParser(description="Check that processes can work together here.")
    parser.add_argument("--report", metavar="FILE", help="also write the outcome as JSON, on the main process")
    options = parser.parse_args(arguments)
    state = PartialState()
    outcomes = _combine(state, run(state))
    hosts = state.gather_object([socket.gethostname()])
    if state.is_main_process:
        report = _report(state, outcomes, hosts)
        through = f" through {state.backend}" if state.use_distributed else ""
        print(f"processes: {state.num_processes}, machines: {', '.join(report['hosts'])}, device: {state.device.type}{through}")
        print(f"{_as_text(outcomes)}\n{report['verdict']}\n{report['summary']}", flush=True)
        if options.report:
            Path(options.report).write_text(json.dumps(report))
    state.destroy_process_group()
    return 1 if any(outcome.failed for outcome in outcomes) else 0


if __name__ == "__main__":
    sys.exit(main())
