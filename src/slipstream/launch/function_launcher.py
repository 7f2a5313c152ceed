"""Launch a function in several processes, from a process that continues afterwards (a notebook, a test).

`launch_function` pickles the call into a private folder and starts `python -m slipstream.launch.function_launcher FOLDER`, which runs the
agent in its own process: `job.json` holds the plan, `function` the pickled call, `result.json` the outcome. Threads and devices of the
caller therefore never get into the workers. The caller raises an error with the report of the first failure.
"""

from __future__ import annotations

import codecs
import io
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, cast

from slipstream.config import Config
from slipstream.config.sources import environment
from slipstream.errors import ConfigError, LaunchError
from slipstream.launch.agent import LaunchResult, run_agent
from slipstream.launch.plan import LOOPBACK, LaunchPlan, MachineSpec, RendezvousSpec, Target, make_plan
from slipstream.launch.worker_main import end_interpreter
from slipstream.launch.worker_processes import die_with_parent

__all__ = ["launch_function", "main"]


def launch_function(
    function: Callable[..., object],
    arguments: Sequence[object] = (),
    *,
    config: Config,
    machine: MachineSpec | None = None,
    console: Literal["all", "main"] = "all",
    output: Callable[[str], object] | None = None,
) -> None:
    """Call a function in several processes, from a process that continues afterwards (a notebook, a test).

    The function is pickled by value, closures included, and `config` says how many processes run it. `output` receives the text that the
    processes print, as it arrives; without it they share the terminal of this process. Raises LaunchError with the report of the first
    failure.
    """
    if config.launch.num_machines > 1:
        raise ConfigError(f"{config.describe('num_machines')}, but a function can only run on one machine.\nUse `slipstream launch`.")
    with tempfile.TemporaryDirectory(prefix="slipstream-") as name:  # created with mode 0700
        folder = Path(name)
        plan = make_plan(config, Target("function", str(_pickle_call(function, arguments, folder))), environment(), machine)
        plan = replace(plan, console=console, rendezvous=RendezvousSpec(backend="static", host=LOOPBACK, port=None, settings={}))
        path = [entry for entry in sys.path if isinstance(entry, str)]
        (folder / "job.json").write_text(json.dumps({"plan": plan.to_json(), "parent": os.getpid(), "path": path}))
        exit_code = _run_launcher(folder, output)
        result = _read_result(folder)
    if exit_code != 0:
        report = str(result.get("report") or f"The launcher ended with exit code {exit_code}.")
        if exit_code == 2 and not result.get("failed"):
            raise ConfigError(report)
        raise LaunchError(report, exit_code=exit_code)


def _pickle_call(function: Callable[..., object], arguments: Sequence[object], folder: Path) -> Path:
    try:
        import cloudpickle
    except ImportError:
        raise ConfigError("Starting a function in several processes needs cloudpickle.\nInstall it: pip install cloudpickle") from None
    payload = folder / "function"
    payload.write_bytes(cloudpickle.dumps((function, tuple(arguments))))
    return payload


def _run_launcher(folder: Path, output: Callable[[str], object] | None) -> int:
    command = [sys.executable, "-m", "slipstream.launch.function_launcher", str(folder)]
    capture: Mapping[str, Any] = {} if output is None else {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    own = str(Path(__file__).resolve().parents[2])  # the launcher imports the same package, however it was found here
    variables = {**environment(), "PYTHONPATH": os.pathsep.join([own, *filter(None, [environment().get("PYTHONPATH")])])}
    with subprocess.Popen(command, env=variables, start_new_session=True, **capture) as process:
        try:
            if output is not None and process.stdout is not None:
                _forward_output(cast("io.BufferedReader", process.stdout), output)
            return process.wait()
        except BaseException:  # the stop button of a notebook, for one: pass it on, and wait until the workers have ended
            process.send_signal(signal.SIGINT)
            process.wait()
            raise


def _forward_output(stream: io.BufferedReader, output: Callable[[str], object]) -> None:
    """Pass text on as it arrives, not line by line: a progress bar has no lines."""
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    while chunk := stream.read1(1 << 16):
        output(decoder.decode(chunk))
    if rest := decoder.decode(b"", final=True):
        output(rest)


def _read_result(folder: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads((folder / "result.json").read_text())
    except (OSError, ValueError):
        return {}
    return found


def main(folder: Path) -> int:
    """Run the job in the folder, in the launcher's process; return the exit code."""
    job = json.loads((folder / "job.json").read_text())
    die_with_parent(job["parent"], signal.SIGTERM)  # which ends the workers first
    sys.path[:] = job["path"]
    try:
        result = run_agent(LaunchPlan.from_json(job["plan"]))
    except ConfigError as error:
        result = LaunchResult(2, str(error))
    (folder / "result.json").write_text(json.dumps({"report": result.report, "failed": result.rank is not None}))
    return result.exit_code


if __name__ == "__main__":
    end_interpreter(main(Path(sys.argv[1])))
