"""The worker of `collectives.py` on every rank: each case with all its contenders in the same processes, interleaved.

A round times `calls` calls of one contender after a barrier; the contenders of a case alternate, in changing order, so
that background load affects all of them. Rank 0 writes the seconds per call of every round as JSON.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import logging
import pstats
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from slipstream import PartialState

warnings.filterwarnings("ignore")
logging.disable(logging.WARNING)
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # the new name, where torch has it


@dataclass(frozen=True)
class Case:
    """Contenders that do the same thing; the first is ours."""

    name: str
    contenders: dict[str, Callable[[], Any]]
    slow: int = 1
    """How many times fewer calls a round has; 0 for one call in each of a few rounds."""


def cases(state: PartialState) -> list[Case]:
    """Return all cases. The result of a contender is checked against ours where it means the same."""
    from accelerate import PartialState as TheirState, utils as theirs

    their_state = TheirState(cpu=True)
    rank, world = state.process_index, state.num_processes
    assert their_state.num_processes == world
    entry = torch.arange(16, dtype=torch.float32) + rank
    kept = torch.empty(16 * world)
    many = {f"metric_{number:02}": torch.full((8,), float(number + rank)) for number in range(20)}
    records = [{"id": rank * 64 + number, "text": f"sample {number}", "score": number / 7} for number in range(64)]
    long_records = [{"id": rank * 64 + number, "text": f"{number:03} abcdefghij" * 18 + "0123456789abcdef"} for number in range(64)]
    texts = [f"a short answer of rank {rank}, number {number}" for number in range(64)]
    ragged = torch.arange(16.0 * (8 + rank)).reshape(8 + rank, 16)
    large = torch.full((16 << 20,), float(rank))
    kept_large, kept_sum = torch.empty(world * large.numel()), torch.empty_like(large)

    def bare(tensor: torch.Tensor, output: torch.Tensor | None = None) -> torch.Tensor:
        output = torch.empty(world * tensor.numel(), dtype=tensor.dtype) if output is None else output
        all_gather_single(output, tensor)
        return output

    def bare_reduce(copy: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(copy)
        return copy

    def bare_broadcast() -> torch.Tensor:
        copy = entry.clone()
        dist.broadcast(copy, 0)
        return copy

    def bare_objects(values: list[Any]) -> list[Any]:
        found: list[Any] = [None] * world
        dist.all_gather_object(found, values)
        return [item for value in found for item in value]

    return [
        Case(
            "one tensor",
            {
                "ours": lambda: state.gather(entry),
                "torch": lambda: bare(entry, kept),
                "torch, fresh": lambda: bare(entry),
                "accelerate": lambda: theirs.gather(entry),
            },
        ),
        Case(
            "20 tensors",
            {
                "ours": lambda: state.gather(many),
                "accelerate": lambda: theirs.gather(many),
                "torch": lambda: {key: bare(value) for key, value in many.items()},
            },
            slow=2,
        ),
        Case(
            "64 dicts",
            {
                "ours": lambda: state.gather_object(records),
                "accelerate": lambda: theirs.gather_object(records),
                "torch": lambda: bare_objects(records),
            },
        ),
        Case(
            "64 long dicts",
            {
                "ours": lambda: state.gather_object(long_records),
                "accelerate": lambda: theirs.gather_object(long_records),
                "torch": lambda: bare_objects(long_records),
            },
        ),
        Case(
            "64 texts",
            {"ours": lambda: state.gather(texts), "accelerate": lambda: theirs.gather_object(texts), "torch": lambda: bare_objects(texts)},
        ),
        Case(
            "reduce",
            {
                "ours": lambda: state.reduce(entry),
                "accelerate": lambda: theirs.reduce(entry, "sum"),
                "torch": lambda: bare_reduce(entry.clone()),
            },
        ),
        Case("reduce 20", {"ours": lambda: state.reduce(many), "accelerate": lambda: theirs.reduce(many, "sum")}, slow=2),
        Case(
            "broadcast",
            {"ours": lambda: state.broadcast(entry), "accelerate": lambda: theirs.broadcast(entry.clone()), "torch": bare_broadcast},
        ),
        Case(
            "broadcast 20",
            {
                "ours": lambda: state.broadcast(many),
                "accelerate": lambda: theirs.broadcast({key: value.clone() for key, value in many.items()}),
            },
            slow=2,
        ),
        Case("ragged", {"ours": lambda: state.gather(ragged), "accelerate": lambda: theirs.gather(theirs.pad_across_processes(ragged))}),
        Case("barrier", {"ours": state.wait_for_everyone, "accelerate": their_state.wait_for_everyone, "torch": dist.barrier}),
        Case(
            "64 MiB",
            {
                "ours": lambda: state.gather(large),
                "accelerate": lambda: theirs.gather(large),
                "torch": lambda: bare(large),
                "torch, reused": lambda: bare(large, kept_large),
            },
            slow=0,
        ),
        Case(
            "64 MiB reduce",
            {
                "ours": lambda: state.reduce(large),
                "accelerate": lambda: theirs.reduce(large, "sum"),
                "torch": lambda: bare_reduce(large.clone()),
                "torch, reused": lambda: bare_reduce(kept_sum.copy_(large)),
            },
            slow=0,
        ),
    ]


def check(case: Case) -> None:
    """Check that the contenders return equal results, except for the padding that others leave in ragged data."""
    results = {name: call() for name, call in case.contenders.items()}
    ours = results.pop("ours")
    for name, result in results.items():
        if result is None or case.name == "ragged":
            continue
        same = all(torch.equal(ours[key], result[key]) for key in ours) if isinstance(ours, dict) else ours == result
        assert same if not isinstance(ours, torch.Tensor) else torch.equal(ours, result.reshape(ours.shape)), f"{case.name}: {name} differs"


def seconds(call: Callable[[], Any], calls: int) -> float:
    dist.barrier()
    start = time.perf_counter()
    for _ in range(calls):
        call()
    return (time.perf_counter() - start) / calls


def measure(case: Case, rounds: int, calls: int) -> dict[str, list[float]]:
    """Return the seconds per call of every round, by contender."""
    calls, rounds = (max(1, calls // case.slow), rounds) if case.slow else (1, max(3, rounds // 20))
    names = list(case.contenders)
    found: dict[str, list[float]] = {name: [] for name in names}
    for name in names:
        seconds(case.contenders[name], max(1, calls // 5))
    for number in range(rounds):
        for place in range(len(names)):
            name = names[(number + place) % len(names)]
            found[name].append(seconds(case.contenders[name], calls))
    return found


def profile(case: Case, calls: int, path: Path, writes: bool) -> None:
    """Profile our code by function: every rank runs under the profiler, so that none waits for a slower one."""
    profiler = cProfile.Profile()
    dist.barrier()
    profiler.runcall(seconds, case.contenders["ours"], calls)
    if writes:
        with path.open("a") as file:
            print(f"\n{case.name}: {calls} calls", file=file)
            pstats.Stats(profiler, stream=file).sort_stats("tottime").print_stats(30)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("output", type=Path)
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--calls", type=int, required=True)
    parser.add_argument("--case", action="append")
    parser.add_argument("--profile", type=Path)
    options = parser.parse_args()
    state = PartialState()
    found = {}
    for case in cases(state):
        if options.case and case.name not in options.case:
            continue
        check(case)
        found[case.name] = measure(case, options.rounds, options.calls)
        if options.profile:
            profile(case, options.calls * 20 if case.slow else 3, options.profile, writes=state.is_main_process)
    if state.is_main_process:
        options.output.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
