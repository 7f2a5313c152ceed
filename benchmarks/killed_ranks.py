"""Repeated kill -9 of a random rank at a random moment, in jobs of 2 and 4 ranks: how the others react, and what is left behind.

    python benchmarks/killed_ranks.py [--kills 20] [--seed 0] [--json FILE]

- every survivor has raised                    within 2 s, naming the rank, the host, the signal and its last collective
- the launcher has ended, with an exit code    within 5 s, and no process of the job is left

Exits with 1 when a goal is missed.
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import psutil
from figures import Figure, launch, options, percentile, quiet_environment, report

LIMIT = 60.0
"""Seconds after which a job counts as stuck."""
COLLECTIVE = re.compile(r"\w+.* number \d+ at _killed_ranks_worker\.py:\d+")


@dataclass(frozen=True)
class Kill:
    """The outcome of one kill."""

    ranks: int
    victim: int
    raised: dict[int, float]
    """Seconds from the kill to the exception, by surviving rank."""
    launcher: float
    """Seconds from the kill to the end of the launcher."""
    troubles: list[str]
    """What was not as promised, in words."""


def kill_once(ranks: int, chance: random.Random) -> Kill:
    """Run one job with one kill."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with (folder / "output").open("w") as output:
            command = launch(ranks, "_killed_ranks_worker.py", name)
            launcher = subprocess.Popen(command, stdout=output, stderr=output, env=quiet_environment())
        try:
            pids = [int(_await_note(folder / f"up-{rank}", launcher)["pid"]) for rank in range(ranks)]
            time.sleep(chance.random() * 0.5)
            victim = chance.randrange(ranks)
            family = psutil.Process(launcher.pid).children(recursive=True)
            killed = time.time()
            os.kill(pids[victim], signal.SIGKILL)
            launcher.wait(LIMIT)
            ended = time.time() - killed
        finally:
            launcher.kill()
            launcher.wait()
        _, left = psutil.wait_procs(family, timeout=0.5)
        troubles = [f"process {process.pid} is left" for process in left]
        troubles += [] if launcher.returncode not in (0, None) else [f"the launcher ended with exit code {launcher.returncode}"]
        notes = {rank: folder / f"raised-{rank}" for rank in range(ranks) if rank != victim}
        raised = {}
        for rank, path in notes.items():
            if path.exists():
                found = json.loads(path.read_text())
                raised[rank] = found["when"] - killed
                troubles += [f"rank {rank} does not {missing}: {found['message']}" for missing in _missing(found, victim)]
            else:
                troubles.append(f"rank {rank} raised nothing; the output was {(folder / 'output').read_text()[-2000:]}")
    return Kill(ranks, victim, raised, ended, troubles)


def _missing(found: dict[str, str], victim: int) -> list[str]:
    """Return what the message of a survivor lacks."""
    first, _, rest = found["message"].partition("\n")
    line = next((line for line in rest.splitlines() if line.strip().startswith(f"rank {victim} ")), "")
    wanted = {
        "raise PeerLostError": found["type"] == "PeerLostError",
        f"name rank {victim}": f"rank {victim} " in first,
        "name the host": socket.gethostname() in first,
        "name the signal": "SIGKILL" in first,
        "name the last collective": bool(COLLECTIVE.search(line)),
    }
    return [what for what, said in wanted.items() if not said]


def _await_note(path: Path, launcher: subprocess.Popen[bytes]) -> dict[str, str]:
    deadline = time.monotonic() + LIMIT
    while not path.exists():
        if launcher.poll() is not None or time.monotonic() > deadline:
            raise SystemExit(f"the job did not come up: exit code {launcher.returncode}, no {path.name}")
        time.sleep(0.005)
    found: dict[str, str] = json.loads(path.read_text())
    return found


def figures(kills: list[Kill]) -> list[Figure]:
    """Return the figures of the slowest survivor and the launcher, and how many kills met the goals."""
    found = []
    for ranks in sorted({kill.ranks for kill in kills}):
        some = [kill for kill in kills if kill.ranks == ranks]
        slowest = [max(kill.raised.values(), default=LIMIT) for kill in some]
        ends = [kill.launcher for kill in some]
        for what, times, goal in (("to the last survivor's exception", slowest, 2.0), ("to the end of the launcher", ends, 5.0)):
            spread = f"p50 {percentile(times, 0.5):.2f}, p99 {percentile(times, 0.99):.2f}, {len(times)} kills"
            found.append(Figure(f"{ranks} ranks: kill -9 {what}, longest", max(times), "s", goal=goal, spread=spread))
    found.append(Figure("kills with something not as promised", sum(bool(kill.troubles) for kill in kills), "kills", goal=0))
    return found


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--kills", type=int, default=20, help="jobs, of 2 and 4 ranks in turns")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    if given.kills < 1:
        parser.error("--kills is how many ranks are killed: give a number above 0")
    chance = random.Random(given.seed)
    kills = []
    for number in range(given.kills):
        kills.append(kill_once((2, 4)[number % 2], chance))
        for trouble in kills[-1].troubles:
            print(f"kill {number} (rank {kills[-1].victim} of {kills[-1].ranks}): {trouble}", flush=True)
    found = figures(kills)
    report("kills", found, given)
    sys.exit(not all(figure.met for figure in found))


if __name__ == "__main__":
    main()
