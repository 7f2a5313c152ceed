"""Every part of the soak, one after the other: a part that fails is reported at the end, and the others run nevertheless.

    python benchmarks/soak.py [--only PART ...] [--hours 2] [--results FILE]

After each part a line is appended to the results (`results/soak/results.md` by default, which docs/benchmarks.md shows), and its output is
in a file beside it, so that a soak that was interrupted can be continued with `--only`. Exits with 1 when a part failed. The parts:

- tests       the tests that are marked `soak`, with many rounds
- saves       1,000 times kill -9 while a checkpoint is written
- restarts    100 restarts of one job, and what its launcher holds
- kills       50 times kill -9 of a rank: who says what, and what is left
- alarms      ten minutes with all cores busy, without a false alarm
- month       a month of a run, ten million lines, in `slipstream watch`
- training    hours of training with random faults
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path

from figures import HERE, above_zero

ROOT = HERE.parent
RESULTS = HERE / "results" / "soak" / "results.md"
TITLES = "| part | when (UTC) | seconds | result | last line |\n|---|---|---|---|---|\n"


def parts(hours: float, results: Path) -> dict[str, list[str]]:
    """Return the command of each part."""
    training = ["benchmarks/soak_training.py", "--hours", str(hours), "--json", str(results.with_name("training.json"))]
    return {
        "tests": ["-m", "pytest", "--soak", "-m", "soak", "--timeout=3600", "--deselect", "tests/faults/test_kills.py"],
        "saves": ["tests/faults/kills.py", "--kills", "1000"],
        "restarts": ["benchmarks/soak_restarts.py", "--kills", "100"],
        "kills": ["benchmarks/killed_ranks.py", "--kills", "50"],
        "alarms": ["benchmarks/false_alarms.py", "--minutes", "10"],
        "month": ["benchmarks/watch.py", "--month"],
        "training": training,
    }


def run(name: str, command: list[str], log: Path) -> tuple[int, str]:
    """Run one part, showing its output and keeping it; return the exit code and the last line."""
    last = ""
    with log.open("w") as kept:
        started = subprocess.Popen([sys.executable, *command], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        assert started.stdout is not None
        for line in started.stdout:
            print(line, end="", flush=True)
            kept.write(line)
            kept.flush()
            last = line.strip() or last
    return started.wait(), last


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="PART", help="run these parts alone")
    parser.add_argument("--hours", type=above_zero, default=2.0, help="of training with random faults")
    parser.add_argument("--results", type=Path, default=RESULTS, help="a line for every part is appended to this file")
    options = parser.parse_args()
    results = options.results.resolve()
    known = parts(options.hours, results)
    unknown = set(options.only or ()) - set(known)
    if unknown:
        parser.error(f"there is no part {', '.join(sorted(unknown))}; the parts are {', '.join(known)}")
    results.parent.mkdir(parents=True, exist_ok=True)
    if not results.exists():
        results.write_text(TITLES)
    rows = []
    for name, command in known.items():
        if options.only and name not in options.only:
            continue
        print(f"== {name}: python {' '.join(command)}", flush=True)
        when, began = time.strftime("%Y-%m-%d %H:%M", time.gmtime()), time.monotonic()
        code, last = run(name, command, results.with_name(f"{name}.log"))
        rows.append((name, code))
        text = f"| {name} | {when} | {time.monotonic() - began:.0f} | {'passed' if code == 0 else f'FAILED ({code})'} | {last[:160]} |\n"
        with results.open("a") as file:
            file.write(text)
        print(f"== {text}", flush=True)
    failed = [name for name, code in rows if code]
    print(f"{len(rows) - len(failed)} of {len(rows)} parts passed. Results: {results}")
    if failed:
        print(f"FAILED: {', '.join(failed)}; what they printed is in {results.with_name('PART.log')}")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
