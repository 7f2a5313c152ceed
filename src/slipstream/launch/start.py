"""Carrying out a plan: one process takes this one's place; several run under the agent, here or in a process of its own.

`launch` is what the command line calls, `launch_function` what notebooks and tests call. Both come back with everything that
was started gone again. The environment of this process changes only where it becomes the launcher (`run_agent`).
"""

from __future__ import annotations

import codecs
import contextlib
import gc
import importlib
import io
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, cast

from slipstream.config import Config
from slipstream.config.sources import environment
from slipstream.errors import ConfigError, LaunchError
from slipstream.launch.foreign import ForeignRendezvous
from slipstream.launch.jsonlines import announce
from slipstream.launch.logs import Folder, parse_tee
from slipstream.launch.plan import Machine, Plan, make_plan
from slipstream.launch.processes import end_descendants
from slipstream.launch.rendezvous import MachineLost, OwnRendezvous, Settings
from slipstream.launch.report import Failure, first_of_all, outcome, render, render_record
from slipstream.launch.signals import Requests, Stopped, listening
from slipstream.launch.store import Place, await_listener, listen
from slipstream.launch.system import adopt_orphans, open_files
from slipstream.launch.target import Target
from slipstream.launch.worker import take_on

__all__ = ["Result", "launch", "launch_function", "run_agent"]


@dataclass(frozen=True)
class Result:
    """How a job ended on this machine."""

    exit_code: int
    report: str = ""
    """For the user; empty when all went well."""
    failures: Sequence[Failure] = field(default=())
    rank: int | None = None
    """The first that failed, if one did."""
    record: tuple[str, str] | None = None
    """The report of failures as the message and the traceback of a log record."""


def launch(plan: Plan, preload: Sequence[str] = ()) -> int:
    """Carry out a plan and print the report, if there is one to print; returns the exit code. One process does not come back.

    `preload` names modules that every worker will want: imported once, before the workers are forked.
    """
    if plan.single:
        _replace_this_process(plan)
    result = run_agent(plan, preload)
    if result.report:
        world = plan.num_processes
        announce(result.report, as_json=plan.as_json, level=logging.ERROR, rank=result.rank, world=world, record=result.record)
    return result.exit_code


def _replace_this_process(plan: Plan) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        os.execvpe(plan.command[0], plan.command, {**environment(), **_alone(), **plan.environment})
    except OSError as error:
        raise ConfigError(f"{plan.command[0]} cannot be started: {error.strerror}.") from None


def _alone() -> dict[str, str]:
    """The variables of a job of one process: they overrule what is left of another job, and torch's own start finds them."""
    listener, place = listen("127.0.0.1", None)
    listener.close()
    ranks = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", "GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1"}
    meeting = {"MASTER_ADDR": place.host, "MASTER_PORT": str(place.port), "TORCHELASTIC_USE_AGENT_STORE": "False"}
    return {**ranks, **meeting, "TORCHELASTIC_RESTART_COUNT": "0", "TORCHELASTIC_RUN_ID": "none"}


def run_agent(plan: Plan, preload: Sequence[str] = ()) -> Result:
    """Become the launcher: start the processes of this machine, watch them until all have ended, and end what they left."""
    tee = parse_tee(plan.tee, plan.local_processes)
    with contextlib.ExitStack() as closing:
        listener = _early_meeting(plan)
        if listener is not None:
            closing.enter_context(listener[0])
        folder = Folder(plan.log_dir, f"run-{os.getpid()}", tee, direct=(0,) if plan.console == "main" else ())
        closing.callback(folder.remove)
        _say_what_is_not_shown(plan, folder)
        take_on(plan.environment)  # before torch is imported: the number of threads is read then
        plan = _import_torch(plan, preload)
        adopt_orphans()
        inherited = open_files() - ({listener[0].fileno()} if listener else set())
        try:
            with listening() as requests:
                return _run(plan, requests, folder, inherited, listener)
        finally:
            left = end_descendants()
            if left:
                _note(plan)(f"slipstream: ended what the processes had left behind: {', '.join(left)}")


def _say_what_is_not_shown(plan: Plan, folder: Folder) -> None:
    """Output that goes to files only must not look lost."""
    ranks = folder.not_shown() if plan.console == "all" else []
    if ranks:
        whose = f"local rank {', '.join(map(str, ranks))}" if len(ranks) < plan.local_processes else "the processes"
        _note(plan)(f"slipstream: the terminal does not show all output of {whose} (tee={plan.tee}); it is in {folder.path}")


def _early_meeting(plan: Plan) -> tuple[socket.socket, Place] | None:
    """Before torch is imported: take the port, or wait until machine 0 has taken it. What cannot work is refused at once."""
    if not plan.meeting.is_own:
        return None
    settings = Settings.read(plan)
    if plan.hosts_store:
        return listen(plan.meeting.host, plan.meeting.port, "main_process_port")
    note = _note(plan)
    place = Place(plan.meeting.host, plan.meeting.port or 0)
    await_listener(place, settings.timeout, check=lambda: None, note=lambda text: note(f"slipstream: {text}"))
    return None


def _note(plan: Plan) -> Callable[[str], None]:
    def note(text: str) -> None:
        if not plan.quiet:
            announce(text, as_json=plan.as_json, world=plan.num_processes)

    return note


def _import_torch(plan: Plan, preload: Sequence[str]) -> Plan:
    """Import torch once for all workers; the plan that comes back starts fresh interpreters if fork turned out to be unsafe."""
    gc.disable()  # the import makes very many objects and no garbage
    import torch.distributed.elastic.agent.server.api  # noqa: F401
    import torch.distributed.elastic.rendezvous  # noqa: F401

    for name in preload if plan.start_method == "fork" else ():
        importlib.import_module(name)
    gc.enable()
    gc.freeze()  # a collection in a worker would otherwise copy the pages that all workers share
    if plan.start_method != "fork":
        return plan
    from slipstream.launch.elastic import fork_is_unsafe

    reason = fork_is_unsafe()
    if reason is None:
        return plan
    if plan.forced:
        _note(plan)(f"slipstream: forking as asked, although {reason}")
        return plan
    _note(plan)(f"slipstream: starting fresh interpreters instead of forking, because {reason}")
    return replace(plan, start_method="spawn", reason=reason)


def _run(plan: Plan, requests: Requests, folder: Folder, inherited: frozenset[int], listener: tuple[socket.socket, Place] | None) -> Result:
    from slipstream.launch.elastic import make_agent

    note = _note(plan)
    meeting = _meeting(plan, requests, note, listener)
    agent = make_agent(plan, meeting, requests=requests, folder=folder, inherited=inherited, environment=environment(), note=note)
    try:
        result = agent.run()
        told = agent.everybody() if result is not None and result.is_failed() else []
    except Stopped as stop:
        return _stopped(plan, stop.signum)
    except MachineLost as lost:
        return Result(lost.exit_code, f"slipstream: {lost}")
    finally:
        meeting.shutdown()
    if not told:
        return Result(0)
    attempts = agent.attempt + 1
    report = render(told, world_size=plan.num_processes, attempts=attempts)
    record = render_record(told, world_size=plan.num_processes, attempts=attempts)
    failures = [failure for failures in told for failure in failures]
    first = first_of_all(told)
    return Result(outcome(first.exit_code), report, failures, first.rank, record)


def _meeting(
    plan: Plan, requests: Requests, note: Callable[[str], None], listener: tuple[socket.socket, Place] | None
) -> OwnRendezvous | ForeignRendezvous:
    from slipstream.launch.foreign import foreign_rendezvous
    from slipstream.launch.rendezvous import own_rendezvous

    if plan.meeting.is_own:
        return own_rendezvous(plan, requests.check, lambda text: note(f"slipstream: {text}"), listener)
    return foreign_rendezvous(plan, requests.check)


def _stopped(plan: Plan, signum: signal.Signals) -> Result:
    count = f"{plan.local_processes} process{'es' if plan.local_processes > 1 else ''}"
    return Result(128 + signum, f"slipstream: stopped by {signum.name}; {count} ended.")


# functions


def launch_function(
    function: Callable[..., object],
    arguments: Sequence[object] = (),
    *,
    config: Config,
    machine: Machine | None = None,
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
        (folder / "job.json").write_text(json.dumps(_job(plan, console)))
        exit_code = _agent_process(folder, output)
        result = _read_result(folder)
    if exit_code != 0:
        report = str(result.get("report") or f"The launcher ended with exit code {exit_code}.")
        raise _error(report, exit_code, [Failure.from_json(entry) for entry in result.get("failures", [])])


def _error(report: str, exit_code: int, failures: list[Failure]) -> Exception:
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


def _job(plan: Plan, console: str) -> dict[str, Any]:
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
    command = [sys.executable, "-m", "slipstream.launch.agent_main", str(folder)]
    capture: Mapping[str, Any] = {} if output is None else {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    own = str(Path(__file__).resolve().parents[2])
    found = os.pathsep.join([own, *filter(None, [environment().get("PYTHONPATH")])])  # the same package, however it was found here
    with subprocess.Popen(command, env={**environment(), "PYTHONPATH": found}, start_new_session=True, **capture) as process:
        try:
            if output is not None and process.stdout is not None:
                _pass_on(cast("io.BufferedReader", process.stdout), output)
            return process.wait()
        except BaseException:  # a notebook's stop button among them: pass it on, and wait for the end of the workers
            process.send_signal(signal.SIGINT)
            process.wait()
            raise


def _pass_on(stream: io.BufferedReader, output: Callable[[str], object]) -> None:
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
