"""The launcher of a function, as a process of its own: `python -m slipstream.launch.agent_main FOLDER`.

The folder is private and was written by `start.launch_function`: `job.json` says what to do, `function` is the pickled call.
The result goes to `result.json` in the same folder; the report is left to the caller, who raises it.
"""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path

from slipstream.errors import ConfigError
from slipstream.launch.plan import LOOPBACK, Meeting, Plan
from slipstream.launch.start import Result, run_agent
from slipstream.launch.system import die_with_parent
from slipstream.launch.target import Target, end_interpreter

__all__ = ["main"]


def main(folder: Path) -> int:
    """Run the job in the folder; returns the exit code."""
    job = json.loads((folder / "job.json").read_text())
    die_with_parent(job["parent"], signal.SIGTERM)  # which ends the workers first
    sys.path[:] = job["path"]
    plan = Plan(
        target=Target("function", str(folder / "function")),
        num_machines=1,
        machine_rank=0,
        local_processes=job["local_processes"],
        environment=job["environment"],
        command=(sys.executable, "-m", "slipstream.launch.worker", "function", str(folder / "function")),
        start_method=job["start_method"],
        reason="",
        forced=job["forced"],
        meeting=Meeting(backend="static", host=LOOPBACK, port=None, settings={}),
        max_restarts=job["max_restarts"],
        monitor_interval=job["monitor_interval"],
        role=job["role"],
        tee=job["tee"],
        log_dir=job["log_dir"],
        quiet=job["quiet"],
        console=job["console"],
        log_format=job["log_format"],
        all_warnings=job["all_warnings"],
    )
    try:
        result = run_agent(plan)
    except ConfigError as error:
        result = Result(2, str(error))
    found = {"exit_code": result.exit_code, "report": result.report, "failures": [failure.to_json() for failure in result.failures]}
    (folder / "result.json").write_text(json.dumps(found))
    return result.exit_code


if __name__ == "__main__":
    end_interpreter(main(Path(sys.argv[1])))
