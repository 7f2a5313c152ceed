"""No false alarms: two ranks run small collectives with pauses on busy cores, and nothing may be reported.

    python benchmarks/false_alarms.py [--minutes 10] [--longest 3]

The pauses (up to 3 s) are far below the default of `hang_warning` (10 s), so a report or an exception would be wrong. Exits with
1 when there was one.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator

from figures import above_zero, launch, quiet_environment


@contextlib.contextmanager
def busy_cores(processes: int) -> Iterator[None]:
    """Run this many processes that keep the cores busy."""
    started = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(processes)]
    try:
        yield
    finally:
        for process in started:
            process.kill()
            process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=above_zero, default=10)
    parser.add_argument("--longest", type=above_zero, default=3, help="seconds of the longest pause")
    options = parser.parse_args()
    cores = os.cpu_count() or 1
    environment = {name: value for name, value in quiet_environment().items() if not name.startswith("SLIPSTREAM_")}
    command = launch(2, "_false_alarms_worker.py", str(options.minutes * 60), str(options.longest))
    start = time.monotonic()
    with busy_cores(cores):
        job = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=options.minutes * 60 + 300)
    minutes = (time.monotonic() - start) / 60
    quiet = job.returncode == 0 and not job.stderr.strip()
    if not quiet:
        print(f"exit code {job.returncode}, and this was printed:\n{job.stderr}")
    calls = job.stdout.strip() or "no"
    verdict = "no alarm" if quiet else "FALSE ALARM"
    print(f"{verdict}: {calls} collectives on 2 ranks in {minutes:.1f} minutes, with {cores} busy processes on {cores} cores")
    sys.exit(not quiet)


if __name__ == "__main__":
    main()
