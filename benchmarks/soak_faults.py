"""The faults of `soak_training.py`: how each one strikes, what has to come of it, and in which order they come.

A round is one launch of the job: some faults after which the job comes back by itself, a calm stretch, and at the end a fault after which
it has to be launched again. The order, the victims and the durations follow from the seed.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from soak_job import RANKS, TIMEOUT, Job, JobEnded


@dataclass(frozen=True)
class Fault:
    """A fault that is about to strike."""

    kind: str
    victim: int
    """A rank; a machine for the faults of launchers and of the network."""
    seconds: float
    """How long it lasts, for those that end."""


@dataclass
class Outcome:
    """What came of a fault."""

    number: int
    kind: str
    victim: int
    launch: int
    machines: int
    step: int
    at: float
    """Seconds since the beginning of the soak."""
    recovery: float | None = None
    """Seconds until every rank had finished a step again: from the fault if processes had to start anew, else from its end."""
    restarts: int = 0
    troubles: list[str] = field(default_factory=list)


def kill(job: Job, fault: Fault) -> float:
    """kill -9 of a rank: all start again, and the report names it."""
    return _restarted(job, lambda: os.kill(_pid(job, fault.victim), signal.SIGKILL), f"rank {fault.victim} of {RANKS}", "SIGKILL")


def hang(job: Job, fault: Fault) -> float:
    """A rank stops for good: the others name it at their time limit, and all start again."""
    words = (f"rank {fault.victim}", "WaitTimeoutError")
    return _restarted(job, lambda: os.kill(_pid(job, fault.victim), signal.SIGSTOP), *words) - TIMEOUT


def pause(job: Job, fault: Fault) -> float:
    """A rank stops for some seconds: nothing happens but that."""
    with _same_attempt(job):
        pid = _pid(job, fault.victim)
        os.kill(pid, signal.SIGSTOP)
        time.sleep(fault.seconds)
        os.kill(pid, signal.SIGCONT)
        return job.wait_for_step()


def slow(job: Job, fault: Fault) -> float:
    """A rank has a tenth of a processor for some seconds: all are slower, and nothing else happens."""
    with _same_attempt(job):
        pid, end = _pid(job, fault.victim), time.monotonic() + fault.seconds
        while time.monotonic() < end:
            os.kill(pid, signal.SIGSTOP)
            time.sleep(0.09)
            os.kill(pid, signal.SIGCONT)
            time.sleep(0.01)
        return job.wait_for_step()


def disk(job: Job, fault: Fault) -> float:
    """The disk is full when a checkpoint is written: an error that says so, restarts, and the run goes on once there is space."""
    filler, step, text = job.disk / "filler", job.step(), len(job.output.read_bytes())
    attempt = job.attempt()
    try:
        _fill(filler)
        job.wait("the error of a full disk", lambda: "CheckpointError" in job.text(text) and job.attempt() > attempt)
        time.sleep(fault.seconds)
    finally:
        filler.unlink()
    recovery = job.wait(f"step {step + 15}, which is after the next checkpoint", lambda: job.step() > step + 14)
    _expect(job, text, "CheckpointError", "No space left on device")
    return recovery


def blip(job: Job, fault: Fault) -> float:
    """The cable between the machines is cut for some seconds: nothing happens but that."""
    assert job.hosts is not None
    with _same_attempt(job):
        job.hosts.cut(fault.victim)
        try:
            time.sleep(fault.seconds)
        finally:
            job.hosts.mend(fault.victim)
        return job.wait_for_step()


def cut(job: Job, fault: Fault) -> float:
    """The cable is cut for good: both launchers say so and end."""
    assert job.hosts is not None
    job.hosts.cut(fault.victim)
    try:
        return _launched_again(job, "heartbeat", "can no longer be reached", mend=lambda: job.hosts and job.hosts.mend(fault.victim))
    finally:
        job.hosts.mend(fault.victim)


def launcher(job: Job, fault: Fault) -> float:
    """kill -9 of a launcher: its workers end with it, the other machine notices, and the job is launched again."""
    named = [f"achine {fault.victim} "] if job.machines > 1 else []  # "Machine 1 sent no heartbeat", "machine 0 can no longer be reached"
    job.launchers[fault.victim].kill()
    return _launched_again(job, *named)


KINDS: dict[str, Callable[[Job, Fault], float]] = {
    "kill": kill,
    "hang": hang,
    "pause": pause,
    "slow": slow,
    "disk full": disk,
    "network blip": blip,
    "network cut": cut,
    "launcher killed": launcher,
}
OF_MACHINES = ("network blip", "network cut", "launcher killed")
"""The kinds whose victim is a machine."""


def schedule(seed: int, number: int, job: Job) -> list[Fault | None]:
    """Return the faults of a round, in order; None is the calm stretch. The last fault ends the launch."""
    chance = random.Random(f"{seed} {number}")
    kinds = ["kill", "kill", "kill", "hang", "pause", "slow", *["disk full"] * job.is_root, *["network blip"] * (job.machines - 1)]
    faults: list[Fault | None] = [Fault(kind, _victim(kind, chance), chance.uniform(2, 6)) for kind in kinds]
    faults.append(None)
    chance.shuffle(faults)
    last = chance.choice(["network cut", "launcher killed"]) if job.machines > 1 else "launcher killed"
    return [*faults, Fault(last, chance.randrange(job.machines), 0)]


def _victim(kind: str, chance: random.Random) -> int:
    return chance.randrange(2 if kind in OF_MACHINES else RANKS)


def _pid(job: Job, rank: int) -> int:
    return job.statuses()[rank].pid


def _restarted(job: Job, strike: Callable[[], None], *words: str) -> float:
    """Strike, and return the seconds until every rank of the next attempt has finished a step."""
    attempt, text = job.attempt(), len(job.output.read_bytes())
    strike()
    seconds = job.wait_for_step(attempt=attempt)
    _expect(job, text, *words)
    return seconds


def _launched_again(job: Job, *words: str, mend: Callable[[], object] = lambda: None) -> float:
    """Wait for the end of the launch, launch again at once, and return the seconds until every rank has finished a step."""
    began = time.monotonic()
    job.await_launchers()
    text, before = job.text(), job.processes()
    job.clear_left()
    mend()
    job.start()
    job.wait("the first step of a new launch", lambda: job.attempt() >= 0)
    seconds = time.monotonic() - began
    left = job.end_processes(before)
    if left:
        raise Unexpected(f"processes were left behind: {left}", seconds)
    missing = [word for word in words if word not in text]
    if missing:
        raise Unexpected(f"the launchers did not say {missing}", seconds)
    return seconds


class Unexpected(JobEnded):
    """The job goes on, but not everything is as promised."""

    def __init__(self, text: str, recovery: float | None = None) -> None:
        super().__init__(text)
        self.recovery = recovery


def _expect(job: Job, since: int, *words: str) -> None:
    text = job.text(since)
    missing = [word for word in words if word not in text]
    if missing:
        raise Unexpected(f"the launcher did not say {missing}")


@contextlib.contextmanager
def _same_attempt(job: Job) -> Iterator[None]:
    """Check that no process has to start anew."""
    attempt, text = job.attempt(), len(job.output.read_bytes())
    yield
    if job.attempt() != attempt:
        raise Unexpected("the job was restarted, although it could go on")
    if "slipstream:" in job.text(text):
        raise Unexpected(f"a false alarm: {job.text(text)[:500]}")


def _fill(path: os.PathLike[str]) -> None:
    """Write until the filesystem is full, and give back a little, less than a checkpoint needs."""
    with open(path, "wb", buffering=0) as file:
        with contextlib.suppress(OSError):
            while True:
                file.write(bytes(1 << 16))
        file.truncate(max(0, file.tell() - (1 << 16)))
