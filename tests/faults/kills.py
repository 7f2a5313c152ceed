"""kill -9 at random moments of saving: afterwards `load_state()` succeeds with a step that was committed, and nothing committed is gone.

    python tests/faults/kills.py [--kills 1000] [--seed 0] [--sharded] [--folder DIR]

Runs train and save without a pause, on 1, 2 and 4 processes, into numbered folders (of which 1 or 3 stay) or over one folder, at once or
behind the training, with and without reused files; all processes are killed at once, or one of them first and the others a moment later.
The next run of the same case loads what is there, compares every tensor, object and random state with what that step must be, and
goes on saving in the same folder until it is killed too. Each commit is reported (and synced) after `save_state` has returned: a
reported step must never be lost. While a run saves, this process looks again and again whether a whole checkpoint is visible.

Every run draws weights, momentum, an object and random states that depend on the run and the step, so no file of one save can pass for
one of another. Prints a table; exits with 1 if a promise was broken.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import itertools
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from slipstream import Accelerator, FullyShardedDataParallelPlugin
from slipstream.checkpoint.commit import read_manifest_or_none
from slipstream.checkpoint.locate import open_checkpoint
from slipstream.checkpoint.manifest import Manifest
from slipstream.checkpoint.rotate import numbered_checkpoints
from slipstream.checkpoint.shard_layout import whole_box
from slipstream.checkpoint.sharded import local_box
from slipstream.distributed.pytree import local_part
from slipstream.errors import CheckpointError
from slipstream.testing import RankPool
from slipstream.utils import ProjectConfiguration, set_seed

PLACES = ("limit 1", "limit 3", "one folder")
VICTIMS = ("all", "main", "another")
ELEMENTS = 1 << 17
"""Of the smallest weight; all tensors together are 5 MB."""
PATIENCE = 60.0


@dataclass(frozen=True)
class Case:
    """How a run saves, and who is killed."""

    ranks: int
    place: str
    behind: bool
    dedup: bool
    victim: str
    in_step: bool
    """Whether the ranks wait for each other at every step; else each runs as fast as it can."""
    sharded: bool = False
    """Whether the state is sharded over the ranks, so that every save needs all of them."""

    def __str__(self) -> str:
        words = [f"{self.ranks} rank{'s' * (self.ranks > 1)}", self.place, "async" if self.behind else "sync", "dedup" * self.dedup]
        kinds = ["" if self.in_step else "not in step", "sharded" * self.sharded]
        return ", ".join(word for word in [*words, f"kill {self.victim}", *kinds] if word)

    @property
    def limit(self) -> int:
        """How many checkpoints stay."""
        return 3 if self.place == "limit 3" else 1


def cases(*, sharded: bool = False) -> list[Case]:
    """Every combination."""
    if sharded:
        combinations = itertools.product((2, 4), PLACES, (False, True), (False, True), VICTIMS)
        return [Case(ranks, place, behind, dedup, victim, True, True) for ranks, place, behind, dedup, victim in combinations]
    return [
        Case(ranks, place, behind, dedup, victim, in_step)
        for ranks, place, behind, dedup, victim in itertools.product((1, 2, 4), PLACES, (False, True), (False, True), VICTIMS)
        for in_step in ((True, False) if ranks > 1 and not dedup else (True,))
        if ranks > 1 or victim == "all"
    ]


# -- a run: what it trains, and what a step must be -------------------------------------------------------------------


class Model(torch.nn.Module):
    """Some weights that are trained, and one that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = torch.nn.Parameter(torch.arange(2.0 * ELEMENTS), requires_grad=False)
        self.first = torch.nn.Parameter(torch.zeros(3 * ELEMENTS))
        self.second = torch.nn.Parameter(torch.zeros(ELEMENTS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.first[:8] * x).sum() + (self.second[:8] * x).sum()


class Diary:
    """An object of the script's own."""

    def __init__(self) -> None:
        self.last: list[int] = []

    def state_dict(self) -> dict[str, Any]:
        return {"last": self.last, "page": torch.full((1000,), float(sum(self.last)))}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.last = state["last"]
        assert torch.equal(state["page"], torch.full((1000,), float(sum(self.last))))


def content(count: int, run: int, step: int, salt: int) -> torch.Tensor:
    """Numbers that differ between runs, steps and tensors nearly everywhere."""
    return (torch.arange(count, dtype=torch.int32) * (2 * salt + 1) + 7919 * step + 104729 * run).remainder_(9973).to(torch.float32)


def part_of(tensor: torch.Tensor, full: torch.Tensor) -> torch.Tensor:
    """The part of these numbers that this rank holds of a tensor."""
    return full[local_box(tensor).slices()]


def held(tensor: torch.Tensor, full: torch.Tensor) -> bool:
    """Whether this rank holds its part of these numbers."""
    return torch.equal(local_part(tensor), part_of(tensor, full))


def draw(run: int, step: int, rank: int) -> None:
    """The random states of a rank at a step."""
    set_seed(((run * 1000) + step) * 10 + rank)


@dataclass
class Run:
    """What a rank has prepared."""

    case: Case
    number: int
    accelerator: Accelerator
    model: Any
    optimizer: Any
    diary: Diary
    target: Path | None

    def train(self, step: int) -> None:
        """One real update, and then the state that belongs to the step."""
        model, optimizer = self.accelerator.unwrap_model(self.model), self.optimizer
        self.accelerator.backward((self.model if self.case.in_step else model)(torch.ones(8)))
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for salt, parameter in enumerate((model.first, model.second)):
                local_part(parameter).copy_(part_of(parameter, content(parameter.numel(), self.number, step, salt)))
                momentum = torch.empty_like(parameter)
                local_part(momentum).copy_(part_of(parameter, content(parameter.numel(), self.number, step, salt + 10)))
                optimizer.state[parameter]["momentum_buffer"] = momentum.detach()
        self.diary.last = [self.number, step]
        draw(self.number, step, self.accelerator.process_index)

    def compare(self) -> dict[str, Any]:
        """What was loaded, after all of it was compared with what that step must be."""
        model, optimizer = self.accelerator.unwrap_model(self.model), self.optimizer
        number, step = self.diary.last
        assert optimizer.updates == step, f"{optimizer.updates} updates at step {step}"
        assert held(model.frozen, torch.arange(2.0 * ELEMENTS)), "frozen weights are not what they were"
        for salt, parameter in enumerate((model.first, model.second)):
            assert held(parameter, content(parameter.numel(), number, step, salt)), f"weight {salt} is not of step {step}"
            buffer = optimizer.state[parameter]["momentum_buffer"]
            assert held(buffer, content(parameter.numel(), number, step, salt + 10)), f"momentum {salt} is not of step {step}"
        present = [torch.rand(3).tolist(), random.random()]
        draw(number, step, self.accelerator.process_index)
        return {"run": number, "step": step, "random": present == [torch.rand(3).tolist(), random.random()]}

    def save(self) -> None:
        self.accelerator.save_state(
            self.target, async_save=self.case.behind, dedup=self.case.dedup, max_shard_size="1MB" if self.case.dedup else None
        )


def begin(case: Case, number: int, folder: Path) -> Run:
    project = ProjectConfiguration(project_dir=str(folder), automatic_checkpoint_naming=case.place != "one folder", total_limit=case.limit)
    plugin = FullyShardedDataParallelPlugin(auto_wrap_policy="no_wrap") if case.sharded else None
    accelerator = Accelerator(cpu=True, project_config=project, fsdp_plugin=plugin)
    model = Model()
    optimizer = torch.optim.SGD([model.first, model.second], lr=0.1, momentum=0.9)
    model, optimizer = accelerator.prepare(model, optimizer)
    diary = Diary()
    accelerator.register_for_checkpointing(diary)
    return Run(case, number, accelerator, model, optimizer, diary, folder / "one" if case.place == "one folder" else None)


def work(case: Case, number: int, folder: str, there: bool, saves: int | None) -> None:
    """One rank of a run: loads what is there, says what it found, and saves until it is killed (or so many times)."""
    run = begin(case, number, Path(folder, "run"))
    rank = run.accelerator.process_index
    found: dict[str, Any] = {"run": 0, "step": 0, "random": True}
    if there:
        run.accelerator.load_state(run.target)
        found = run.compare()
    run.accelerator.wait_for_everyone()
    note = Path(folder, f"found-{rank}")
    note.with_suffix(".part").write_text(json.dumps({**found, "pid": os.getpid()}))
    note.with_suffix(".part").rename(note)
    reports = os.open(Path(folder, f"reports-{rank}"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    first: int = found["step"] + 1
    for step in itertools.count(first) if saves is None else range(first, first + saves):
        run.train(step)
        if saves is not None and step == first + saves - 1:  # nobody is late for the save before the last
            run.accelerator._saver.background.wait()
            run.accelerator.wait_for_everyone()
        run.save()
        committed = step - 1 if case.behind else step  # a save waits for the one before it
        if committed >= first:
            os.write(reports, f"{number} {committed}\n".encode())
            os.fsync(reports)
    run.accelerator.end_training()
    os.close(reports)


def in_child(function: Callable[..., None], *arguments: Any) -> tuple[int, str]:
    """Runs a function in a fork of this rank, which can be killed while the rank stays; its exit code, and what it raised."""
    said = Path(tempfile.mkdtemp()) / "said"
    pid = os.fork()
    if pid == 0:
        try:
            ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: it ends with the rank
            function(*arguments)
            os._exit(0)
        except BaseException:  # it must not return into the rank
            said.write_text(traceback.format_exc())
        finally:
            sys.stdout.flush()
            os._exit(1)
    _, status = os.waitpid(pid, 0)
    text = said.read_text() if said.exists() else ""
    shutil.rmtree(said.parent)
    return os.waitstatus_to_exitcode(status), text


# -- the parent: kills, looks, compares -------------------------------------------------------------------------------


@dataclass
class Tally:
    """What came of the kills of a case."""

    kills: int = 0
    torn: int = 0
    """Kills that left a hidden stage or a part of one: they came in the middle of writing."""
    saves: int = 0
    """Commits that were reported."""
    looks: int = 0
    """How often the watcher found a whole checkpoint."""
    troubles: list[str] = field(default_factory=list)


def committed(case: Case, folder: Path) -> dict[str, tuple[int, int]]:
    """Run and step of every visible checkpoint by name, after all its files were verified."""
    paths = [folder / "one"] if case.place == "one folder" else [path for _, path in numbered_checkpoints(folder / "checkpoints")]
    if case.place == "one folder" and not paths[0].exists():
        return {}
    found = {}
    for path in paths:
        checkpoint = open_checkpoint(path)
        number, step = checkpoint.part(checkpoint.manifest.objects[0])["last"]
        assert step == checkpoint.manifest.step, f"{path} says step {checkpoint.manifest.step}, and holds step {step}"
        if case.sharded:  # the shards of all ranks are those of this step
            weights = checkpoint.weights(0)
            for salt, name in enumerate(("first", "second")):
                stored = checkpoint.placeholders.read(weights[name], whole_box(weights[name].shape))
                assert torch.equal(stored, content(stored.numel(), number, step, salt)), f"{name} in {path} is not of step {step}"
        found[path.name] = (number, step)
    return found


def looked(case: Case, folder: Path) -> bool:
    """Whether a whole checkpoint is visible now. One that gives way to a newer one while it is being read was there, as that is."""
    before = _visible(case, folder)
    for path in reversed(before):
        try:
            open_checkpoint(path)
            return True
        except (CheckpointError, OSError):
            continue
    return bool(before) and _visible(case, folder) not in ({}, before)


def _visible(case: Case, folder: Path) -> dict[Path, Manifest]:
    """The manifests that are there; a folder that is exchanged at this moment has one the next time one looks."""
    for _ in range(20):
        paths = [folder / "one"] if case.place == "one folder" else [path for _, path in numbered_checkpoints(folder / "checkpoints")]
        found = {path: manifest for path in paths if (manifest := read_manifest_or_none(path)) is not None}
        if found:
            return found
    return {}


@dataclass
class Chain:
    """The runs of one case, each of which goes on where the one before it was killed."""

    case: Case
    folder: Path
    chance: random.Random
    tally: Tally = field(default_factory=Tally)
    number: int = 0
    history: list[tuple[int, int]] = field(default_factory=list)
    """Run and step of everything that was committed, as far as it is known, in order."""
    surely: dict[tuple[int, int], int] = field(default_factory=dict)
    """By rank and run, the last step that it reported: a rank that was killed in a run may be ahead of the others in the next."""
    joint: tuple[int, int] | None = None
    """The last save that every rank reported: from then on there is a complete checkpoint."""
    pace: float = 0.1
    """Seconds from one save to the next, as far as they were seen."""

    @property
    def keeps_complete(self) -> bool:
        """Whether the newest complete checkpoint stays when a rank is killed: it does where checkpoints are numbered."""
        return self.case.place != "one folder" and self.case.ranks > 1

    def kill_once(self, pool: RankPool) -> None:
        """One run and its end; what it had committed is compared."""
        there = self._begin()
        over = threading.Event()
        killer = threading.Thread(target=self._killer, args=(over, there))
        killer.start()
        try:
            ended = pool.run(in_child, work, self.case, self.number, str(self.folder), there, None, timeout=PATIENCE)
        finally:
            over.set()
            killer.join()
        self.tally.kills += 1
        for rank, (code, text) in enumerate(ended):  # a rank that has lost another raises by itself; nothing else may be raised
            if code != -signal.SIGKILL and not text.rpartition("\n\n")[2].count("PeerLostError"):
                self._trouble(f"rank {rank} ended with {code}: {text}")
        self._compare_found(there)
        self._compare_files()

    def end(self, pool: RankPool) -> None:
        """A last run that ends by itself: it loads, saves, and leaves nothing behind but checkpoints."""
        there = self._begin()
        for path in (self.folder / "run").rglob(".*"):
            if path.is_file():  # what may be of a run that lives is removed only when it is old
                os.utime(path, (time.time() - 7200.0,) * 2)
        saves = self.case.limit + 1
        ended = pool.run(in_child, work, self.case, self.number, str(self.folder), there, saves, timeout=PATIENCE)
        for rank, (code, text) in enumerate(ended):
            if code:
                self._trouble(f"rank {rank} of a run that was not disturbed ended with {code}: {text}")
        self._compare_found(there)
        run = self.folder / "run"
        inside = run if self.case.place == "one folder" else run / "checkpoints"
        expected = {"one"} if self.case.place == "one folder" else {"latest", *committed(self.case, run)}
        found = set(os.listdir(inside)) - {"runs"}  # what the runs wrote down about themselves
        if found != expected or len(committed(self.case, run)) != self.case.limit:
            self._trouble(f"after a run that ended by itself there are {sorted(found)} in {inside}")

    def _begin(self) -> bool:
        """Another run; whether there is something that it has to load."""
        self.number += 1
        for note in self.folder.glob("found-*"):
            note.unlink()
        return bool(self.history)

    def _trouble(self, text: str) -> None:
        self.tally.troubles.append(f"{self.case}, run {self.number}: {text}")

    def _killer(self, over: threading.Event, there: bool) -> None:
        """Waits until every rank has loaded, looks for checkpoints until the moment comes, and kills."""
        while len(list(self.folder.glob("found-*[0-9]"))) < self.case.ranks:
            if over.wait(0.002):
                return
        pids = [json.loads(Path(self.folder, f"found-{rank}").read_text())["pid"] for rank in range(self.case.ranks)]
        for moment in self._until_the_moment():
            if there or moment:
                if not looked(self.case, self.folder / "run"):
                    self._trouble("no whole checkpoint was visible")
                self.tally.looks += 1
            time.sleep(0.002)
        victims = {"all": pids, "main": pids[:1], "another": [self.chance.choice(pids[1:] or pids)]}[self.case.victim]
        for pid in victims:
            _kill(pid)
        if len(victims) < len(pids):
            time.sleep(self.chance.random() * self.pace)
            for pid in pids:
                _kill(pid)

    def _until_the_moment(self) -> Iterator[int]:
        """Goes on until a random moment within the first saves of a run; gives out how many it has reported."""
        awaited, began, reported = self.chance.randrange(3), time.monotonic(), 0
        while reported < awaited and time.monotonic() < began + PATIENCE / 4:
            yield reported
            reported = len(self._reports(0))
        if reported:
            self.pace = (time.monotonic() - began) / reported
        moment = time.monotonic() + self.chance.random() * 1.2 * self.pace
        while time.monotonic() < moment:
            yield reported

    def _reports(self, rank: int) -> list[tuple[int, int]]:
        """Run and step of what a rank of this run has reported."""
        try:
            lines = Path(self.folder, f"reports-{rank}").read_text().splitlines()
        except FileNotFoundError:
            return []
        reports = [(int(number), int(step)) for number, step in map(str.split, lines)]
        return [report for report in reports if report[0] == self.number]

    def _compare_found(self, there: bool) -> None:
        """What the run has loaded is one of the last saves of the one before it, with the random states of ranks that had returned."""
        found = {}
        for rank in range(self.case.ranks):
            with contextlib.suppress(FileNotFoundError):
                found[rank] = json.loads(Path(self.folder, f"found-{rank}").read_text())
        if len(found) < self.case.ranks:
            return self._trouble(f"only ranks {sorted(found)} came to their first save")
        steps = {(entry["run"], entry["step"]) for entry in found.values()}
        complete = all(entry["random"] for entry in found.values())
        older = self.keeps_complete and complete and len(steps) == 1 and steps <= set(self.history)
        if there and steps != {self.history[-1]} and not older:
            return self._trouble(f"{steps} was loaded, and {self.history[-1]} was committed last")
        kept = self.joint is None or not self.keeps_complete or not self.case.in_step or (complete and max(steps) >= self.joint)
        if there and not kept:
            return self._trouble(f"{steps} was loaded with random states {complete}, and all ranks had saved {self.joint}")
        for rank, entry in found.items():
            run, step = self.history[-1] if self.history else (0, 0)
            if not entry["random"] and self.surely.get((rank, run), -1) >= step:
                self._trouble(
                    f"the random state of rank {rank} at {self.history[-1]} is not there, although it had returned from that save"
                )
        return None

    def _compare_files(self) -> None:
        """Everything that was reported is there, as far as the limit says."""
        run = self.folder / "run"
        hidden = [path.name for path in (*run.glob(".*"), *run.glob("checkpoints/.*"))]
        self.tally.torn += any(".saving-" in name or ".was-" in name or ".removing-" in name for name in hidden)
        for rank in range(self.case.ranks):
            for run_number, step in self._reports(rank):
                self.surely[rank, run_number] = step
        self.history += self._reports(0)
        if all(reported := [self._reports(rank) for rank in range(self.case.ranks)]):
            self.joint = min(reports[-1] for reports in reported)
        self.tally.saves += len(self._reports(0))
        try:
            visible = sorted(committed(self.case, run).values())
        except (CheckpointError, AssertionError) as error:
            return self._trouble(f"a visible checkpoint is broken: {error}")
        newer = [entry for entry in visible if not self.history or entry > self.history[-1]]
        if len(newer) > 1 + self.case.behind:
            self._trouble(f"{newer} were never reported")
        self.history += newer
        missing = set(self.history[-self.case.limit :]) - set(visible)
        if missing:
            self._trouble(f"{sorted(missing)} had been committed, and only {visible} are there")
        return None


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def spread(count: int, chance: random.Random, *, sharded: bool = False) -> list[Case]:
    """So many cases, chosen such that every pair of their properties comes as soon as possible."""
    left, chosen = cases(sharded=sharded), []
    chance.shuffle(left)
    seen: set[Any] = set()
    while left and len(chosen) < count:
        pairs = {case: list(itertools.combinations(sorted(vars(case).items()), 2)) for case in left}
        best = max(left, key=lambda case: sum(pair not in seen for pair in pairs[case]))
        seen.update(pairs[best])
        chosen.append(best)
        left.remove(best)
    return chosen


def campaign(
    pools: Callable[..., RankPool],
    folder: Path,
    kills: int,
    seed: int,
    progress: Callable[[int], None],
    *,
    sharded: bool = False,
) -> list[Chain]:
    """So many kills, dealt out to cases; each case that was begun also ends once by itself."""
    each = max(4, -(-kills // len(cases(sharded=sharded))))  # some, so that what a kill leaves is met by the next
    chosen = spread(max(1, round(kills / each)), random.Random(seed), sharded=sharded)
    chains = []
    done = 0
    for number, case in enumerate(sorted(chosen, key=lambda case: case.ranks)):
        chain = Chain(case, folder / f"case-{number}", random.Random(f"{seed} {case}"))
        chain.folder.mkdir(parents=True)
        chains.append(chain)
        for _ in range(each if number < len(chosen) - 1 else max(1, kills - done)):
            chain.kill_once(pools(case.ranks, device="cpu"))
            done += 1
            progress(done)
        chain.end(pools(case.ranks, device="cpu"))
        if not chain.tally.troubles:
            shutil.rmtree(chain.folder)
    return chains


def table(chains: list[Chain]) -> str:
    """Counts for each case, and for all."""
    rows = [("case", "kills", "in the middle", "commits reported", "looks", "troubles")]
    count = [0] * 5
    for chain in chains:
        tally = chain.tally
        numbers = [tally.kills, tally.torn, tally.saves, tally.looks, len(tally.troubles)]
        count = [entry + other for entry, other in zip(count, numbers, strict=True)]
        rows.append((str(chain.case), *map(str, numbers)))  # type: ignore[arg-type]
    rows.append((f"all {len(chains)} cases", *map(str, count)))  # type: ignore[arg-type]
    widths = [max(len(row[column]) for row in rows) for column in range(6)]
    return "\n".join(
        "  ".join(cell.ljust(width) if not n else cell.rjust(width) for n, (cell, width) in enumerate(zip(row, widths, strict=True)))
        for row in rows
    )


@contextlib.contextmanager
def _pools() -> Iterator[Callable[..., RankPool]]:
    with contextlib.ExitStack() as stack:
        made: dict[int, RankPool] = {}

        def pool(size: int, device: str) -> RankPool:
            if size not in made:
                made[size] = stack.enter_context(RankPool(size, device))
            return made[size]

        yield pool


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--sharded", action="store_true", help="kill runs whose state is sharded")
    parser.add_argument("--folder", type=Path, help="where to save; kept if a promise was broken")
    options = parser.parse_args()
    folder = options.folder or Path(tempfile.mkdtemp(prefix="slipstream-kills-"))
    began = time.monotonic()

    def progress(done: int) -> None:
        if done % 50 == 0:
            print(f"{done} kills, {time.monotonic() - began:.0f} s", file=sys.stderr)

    with _pools() as pools, open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):  # what ranks print
        chains = campaign(pools, folder, options.kills, options.seed, progress, sharded=options.sharded)
    print(table(chains))
    troubles = [trouble for chain in chains for trouble in chain.tally.troubles]
    print("\n".join(troubles) or f"Nothing was lost. {time.monotonic() - began:.0f} s.")
    if not troubles:
        shutil.rmtree(folder)
    return 1 if troubles else 0


if __name__ == "__main__":
    sys.exit(main())
