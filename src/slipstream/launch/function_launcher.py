"""Launch a function in several processes, from a process that continues afterwards (a notebook, a test).

`launch_function` pickles the call into a private folder and starts `python -m slipstream.launch.function_launcher FOLDER`, which runs the
agent in a process of its own: `job.json` holds the plan, `function` the pickled call, `result.json` the outcome. Threads and devices of
the caller therefore never get into the workers. The caller raises the report.
"""

from __future__ import annotations

import codecs
import contextlib
import io
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, cast

from slipstream.config import Config
from slipstream.config.sources import environment
from slipstream.errors import ConfigError, LaunchError
from slipstream.launch.agent import LaunchResult, run_agent
from slipstream.launch.failure_report import WorkerFailure
from slipstream.launch.plan import LOOPBACK, LaunchPlan, MachineSpec, RendezvousSpec, make_plan
from slipstream.launch.worker import Target, end_interpreter
from slipstream.launch.workers import (
    die_with_parent,
)

__all__ = ["launch_function", "main"]


def main(folder: Path) -> int:
    """Run the job in the folder; returns the exit code."""
    job = json.loads((folder / "job.json").read_text())
    die_with_parent(job["parent"], signal.SIGTERM)  # which ends the workers first
    sys.path[:] = job["path"]
    plan = LaunchPlan(
        target=Target("function", str(folder / "function")),
        num_machines=1,
        machine_rank=0,
        local_processes=job["local_processes"],
        environment=job["environment"],
        command=(sys.executable, "-m", "slipstream.launch.worker", "function", str(folder / "function")),
        start_method=job["start_method"],
        reason="",
        forced=job["forced"],
        meeting=RendezvousSpec(backend="static", host=LOOPBACK, port=None, settings={}),
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
        result = LaunchResult(2, str(error))
    found = {"exit_code": result.exit_code, "report": result.report, "failures": [failure.to_json() for failure in result.failures]}
    (folder / "result.json").write_text(json.dumps(found))
    return result.exit_code


if __name__ == "__main__":
    end_interpreter(main(Path(sys.argv[1])))


# functions


def launch_function(
    function: Callable[..., object],
    arguments: Sequence[object] = (),
    *,
    config: Config,
    machine: MachineSpec | None = None,
    console: Literal["all", "main"] = "all",
    output: Callable[[str], object] | None = None,
) -> None:
    """Call a function in several processes, from a process that goes on afterwards (a notebook, a test).

    The launcher is a fresh process, so nothing of this one (threads, devices) gets into the workers; the function travels by
    value, closures included. `config` says how many processes and all the rest. `output` is given the text that the processes
    print, as it comes; without it they share this process's terminal. Raises LaunchError with the report of the first failure.
    """
    if config.launch.num_machines > 1:
        raise ConfigError(f"{config.said('num_machines')}, but a function can only be started on one machine.\nUse `slipstream launch`.")
    with _private_folder() as folder:
        payload = _pack(function, arguments, folder)
        plan = make_plan(config, Target("function", str(payload)), environment(), machine)
        if plan.single:  # a process of its own all the same: the caller's stays as it is
            plan = replace(plan, start_method="fork" if sys.platform == "linux" else "spawn")
        (folder / "job.json").write_text(json.dumps(_job_record(plan, console)))
        exit_code = _agent_process(folder, output)
        result = _read_result(folder)
    if exit_code != 0:
        report = str(result.get("report") or f"The launcher ended with exit code {exit_code}.")
        raise _launch_error(report, exit_code, [WorkerFailure.from_json(entry) for entry in result.get("failures", [])])


def _launch_error(report: str, exit_code: int, failures: list[WorkerFailure]) -> Exception:
    if exit_code == 2 and not failures:
        return ConfigError(report)
    return LaunchError(report, exit_code=exit_code)


@contextlib.contextmanager
def _private_folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="slipstream-") as name:  # made with mode 0700
        yield Path(name)


def _pack(function: Callable[..., object], arguments: Sequence[object], folder: Path) -> Path:
    try:
        import cloudpickle
    except ImportError:
        raise ConfigError("Starting a function in several processes needs cloudpickle.\nInstall it: pip install cloudpickle") from None
    payload = folder / "function"
    payload.write_bytes(cloudpickle.dumps((function, tuple(arguments))))
    return payload


def _job_record(plan: LaunchPlan, console: str) -> dict[str, Any]:
    """What the launcher's process is told: the parts of the plan that it cannot know, and how imports work here."""
    names = ("local_processes", "start_method", "forced", "max_restarts", "monitor_interval", "role", "tee", "log_dir", "quiet")
    return {
        **{name: getattr(plan, name) for name in (*names, "log_format", "all_warnings")},
        "console": console,
        "parent": os.getpid(),
        "environment": dict(plan.environment),
        "path": [entry for entry in sys.path if isinstance(entry, str)],
    }


def _agent_process(folder: Path, output: Callable[[str], object] | None) -> int:
    command = [sys.executable, "-m", "slipstream.launch.function_launcher", str(folder)]
    capture: Mapping[str, Any] = {} if output is None else {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    own = str(Path(__file__).resolve().parents[2])
    found = os.pathsep.join([own, *filter(None, [environment().get("PYTHONPATH")])])  # the same package, however it was found here
    with subprocess.Popen(command, env={**environment(), "PYTHONPATH": found}, start_new_session=True, **capture) as process:
        try:
            if output is not None and process.stdout is not None:
                _forward_output(cast("io.BufferedReader", process.stdout), output)
            return process.wait()
        except BaseException:  # a notebook's stop button among them: pass it on, and wait for the end of the workers
            process.send_signal(signal.SIGINT)
            process.wait()
            raise


def _forward_output(stream: io.BufferedReader, output: Callable[[str], object]) -> None:
    """Text as it comes, not line by line: a progress bar has no lines."""
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    while chunk := stream.read1(1 << 16):
        output(decoder.decode(chunk))
    rest = decoder.decode(b"", final=True)
    if rest:
        output(rest)


def _read_result(folder: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads((folder / "result.json").read_text())
    except (OSError, ValueError):
        return {}
    return found
