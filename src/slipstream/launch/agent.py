"""Carry out a launch plan: one process is exec'd, several run under torch's elastic agent with workers that we fork, watch and stop.

`launch` is what the command line calls; `run_agent` turns this process into the launcher and returns when every process that it started
is gone. torch's `SimpleElasticAgent` runs the loop (rendezvous, start, monitor, restart); `Agent` implements the operations that it
leaves open. The exit of a worker is noticed at once and written to the store first, so that the other ranks can raise and name the lost
rank; they get a short grace period, then a signal, then SIGKILL. The report of an attempt that is followed by another is printed here,
that of the last attempt by the caller.

One loss does not end an attempt: that of a rank working on queue items that the other ranks take over (`holds_items_key`). The others
finish; the job still fails, and the report names the lost rank.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final

from slipstream.config.sources import environment
from slipstream.errors import ConfigError
from slipstream.launch.failure_report import (
    WorkerFailure,
    exit_status,
    first_failure_of_job,
    lost_machine_failures,
    read_worker_error,
    render_log_record,
    render_report,
    user_stack,
)
from slipstream.launch.output import LogFolder, Tee, WorkerFiles, announce, as_json_line, parse_tee
from slipstream.launch.plan import LaunchPlan
from slipstream.launch.rendezvous import MachineLostError, RendezvousTimeouts, StaticRendezvous, TorchRendezvous
from slipstream.launch.store import (
    ALARM_KEY,
    FOLLOWED_LOSS_KEY,
    LOST_HOLDERS_KEY,
    ExitNotice,
    StoreAddress,
    attempt_prefix,
    exit_key,
    holds_items_key,
    open_listener,
    wait_for_listener,
)
from slipstream.launch.warning_dedup import OUTPUT_VARIABLE, WorkerOutput
from slipstream.launch.worker import ERROR_FILE_VARIABLE, STACK_FILE_VARIABLE, ForkedWorker, set_environ
from slipstream.launch.workers import (
    KILL_AFTER,
    ProcessExit,
    StopRequested,
    StopRequests,
    WorkerProcesses,
    become_subreaper,
    capture_signals,
    oom_kill_counts,
    open_descriptors,
    terminate_descendants,
)

__all__ = ["Agent", "LaunchResult", "launch", "make_agent", "run_agent", "unsafe_fork_reason"]


if TYPE_CHECKING:
    from torch.distributed.elastic.agent.server.api import RunResult, SimpleElasticAgent as _Agent, Worker as Rank, WorkerGroup, WorkerSpec
else:
    _Agent = object

_GRACE: Final = 1.0
"""Seconds in which survivors of a failure may raise by themselves."""
_GRACE_BEFORE_RESTART: Final = 0.3
_PATIENCE: Final = {signal.SIGINT: 5.0}
_USUAL_PATIENCE: Final = 10.0
"""Seconds that workers get to end after a signal to the launcher was passed on to them."""


class Agent(_Agent):
    """The verbs of an elastic agent; `make_agent` joins them with torch's class."""

    def __init__(
        self,
        spec: WorkerSpec,
        *,
        plan: LaunchPlan,
        meeting: StaticRendezvous | TorchRendezvous,
        requests: StopRequests,
        folder: LogFolder,
        inherited: frozenset[int],
        environment: Mapping[str, str],
        note: Callable[[str], None],
    ) -> None:
        super().__init__(spec)
        self._plan = plan
        self._meeting = meeting
        self._requests = requests
        self._folder = folder
        self._inherited = inherited
        self._environment = environment
        self._note = note
        self._host = socket.gethostname()
        self._crew = WorkerProcesses()
        self._tee = Tee()
        self._outlets: dict[int, WorkerFiles] = {}
        self._kills: dict[str, int] = {}
        self._seen = 0
        self._reported_done = False
        self._borne: list[WorkerFailure] = []
        """Of the failures, those that the other processes can do without, and what followed from them."""
        self.failures: list[WorkerFailure] = []
        """How the processes of this machine failed in the last attempt."""

    @property
    def attempt(self) -> int:
        return max(0, self._meeting.generation)

    def everybody(self) -> list[list[WorkerFailure]]:
        """The failures of the last attempt, one list for each machine, the first to fail first."""
        told = self._meeting.reported()
        return told or ([self.failures] if self.failures else [])

    # what torch's agent asks

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        self._crew, self.failures, self._borne, self._seen, self._reported_done = WorkerProcesses(), [], [], 0, False
        self._kills = oom_kill_counts()
        if isinstance(self._meeting, StaticRendezvous):  # a failure anywhere costs every machine one attempt
            self._remaining_restarts = self._plan.max_restarts - self.attempt
        for rank in worker_group.workers:
            self._start(rank, worker_group)
        return dict(self._crew.pids)

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        from torch.distributed.elastic.agent.server.api import RunResult, WorkerState

        self._crew.wait(self._plan.monitor_interval, self._requests.wake)
        self._tee.pump()
        self._requests.check()
        self._write_down(self._crew.poll(), worker_group)
        self._meeting.beat()
        self._notice_lost(worker_group)
        if len(self.failures) > len(self._borne) or (self._meeting.look() and self._others_failed()):
            self._let_the_others_raise(worker_group)
            return RunResult(state=WorkerState.FAILED)
        if not self._crew.running and self._all_finished():
            return RunResult(state=self._end_of_all(worker_group))
        return RunResult(state=WorkerState.HEALTHY)

    def _end_of_all(self, group: WorkerGroup) -> Any:
        """All processes of this machine have ended, and none of them took the others along."""
        from torch.distributed.elastic.agent.server.api import WorkerState

        if not self._borne and not self._counted(LOST_HOLDERS_KEY):
            return WorkerState.SUCCEEDED
        if not self._counted(FOLLOWED_LOSS_KEY) and self._counted(LOST_HOLDERS_KEY) < group.workers[0].world_size:
            self._remaining_restarts = 0  # the others have done all of the work
        self._let_the_others_raise(group)
        return WorkerState.FAILED

    def _others_failed(self) -> bool:
        """Whether more has happened on all machines than what is borne."""
        return sum(map(len, self._meeting.reported())) > self._counted(LOST_HOLDERS_KEY) + self._counted(FOLLOWED_LOSS_KEY)

    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        self._shutdown()

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = 30) -> None:
        """End what still runs: with the signal that the launcher itself got, if it did. Torch's ideas of both are not used."""
        asked = self._requests.stop
        patience = KILL_AFTER if asked is None else _PATIENCE.get(asked, _USUAL_PATIENCE)
        self._crew.stop(signum=asked or death_sig, patience=patience, hurry=self._requests.hurry, wake=self._requests.wake)
        self._tee.finish()

    def _exit_barrier(self) -> None:
        if isinstance(self._meeting, TorchRendezvous):
            super()._exit_barrier()  # type: ignore[no-untyped-call] # with our own rendezvous `_all_finished` has already waited

    def _assign_worker_ranks(self, store: Any, group_rank: int, group_world_size: int, spec: WorkerSpec) -> list[Rank]:
        if isinstance(self._meeting, TorchRendezvous):
            ranks: list[Rank] = super()._assign_worker_ranks(store, group_rank, group_world_size, spec)
            return ranks
        from torch.distributed.elastic.agent.server.api import Worker as Rank

        here, world = spec.local_world_size, spec.local_world_size * group_world_size
        first = group_rank * here
        return [Rank(local, first + local, first + local, world, world) for local in range(here)]

    def _record_worker_events(self, result: RunResult) -> None:
        """torch's event records look up the host's full name, which may take seconds, for a handler that drops them."""

    @contextlib.contextmanager
    def record_duration(self, state: str) -> Iterator[None]:
        yield

    def _construct_event(self, state: str, source: Any, *_: Any, **__: Any) -> Any:
        from torch.distributed.elastic.events.api import Event

        return Event(state, source=source)

    # starting

    def _start(self, rank: Rank, group: WorkerGroup) -> None:
        outlet = self._folder.outlet(self.attempt, rank.global_rank, rank.local_rank)
        self._outlets[rank.local_rank] = outlet
        environment = {**self._environment, **self._rank_environment(rank, group)}
        environment[ERROR_FILE_VARIABLE], environment[STACK_FILE_VARIABLE] = str(outlet.confession), str(outlet.stack)
        silent = self._plan.console == "main" and rank.global_rank != 0
        environment[OUTPUT_VARIABLE] = self._voice(outlet).dump()
        stdout, stderr = (_open_for_append(path or os.devnull) if path or silent else None for path in (outlet.stdout, outlet.stderr))
        if self._plan.start_method == "fork":
            self._crew.fork(rank.local_rank, self._forked(environment, stdout, stderr).live)
        else:
            self._crew.execute(rank.local_rank, self._plan.command, environment, stdout, stderr)
        for path, file, terminal in ((outlet.stdout, stdout, 1), (outlet.stderr, stderr, 2)):
            if file is not None:
                os.close(file)
            if path is not None and not silent and outlet.followed & terminal:
                prefix, hidden = f"[{self._plan.role}{rank.global_rank}]:", outlet.hidden.with_suffix(f".{terminal}")
                self._tee.follow(path, prefix, terminal, hidden=hidden, json_lines=self._plan.as_json)

    def _voice(self, outlet: WorkerFiles) -> WorkerOutput:
        """Only those whose output is seen may speak for the others."""
        together = self._plan.local_processes > 1 and not self._plan.all_warnings and self._plan.console == "all" and outlet.is_shown
        claims = str(outlet.claims) if together else ""
        return WorkerOutput(json=self._plan.as_json, claims=claims, hidden=str(outlet.hidden), files=outlet.files)

    def _forked(self, environment: dict[str, str], stdout: int | None, stderr: int | None) -> ForkedWorker:
        return ForkedWorker(
            target=self._plan.target,
            environment=environment,
            stdout=stdout,
            stderr=stderr,
            foreign=open_descriptors() - self._inherited,
            handlers=self._requests.previous,
            blocked=frozenset(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
            parent=os.getpid(),
        )

    def _rank_environment(self, rank: Rank, group: WorkerGroup) -> dict[str, str]:
        found = {
            "RANK": rank.global_rank,
            "LOCAL_RANK": rank.local_rank,
            "WORLD_SIZE": rank.world_size,
            "LOCAL_WORLD_SIZE": group.spec.local_world_size,
            "GROUP_RANK": group.group_rank,
            "GROUP_WORLD_SIZE": group.group_world_size,
            "ROLE_NAME": group.spec.role,
            "ROLE_RANK": rank.role_rank,
            "ROLE_WORLD_SIZE": rank.role_world_size,
            "MASTER_ADDR": group.master_addr,
            "MASTER_PORT": group.master_port,
            "TORCHELASTIC_RESTART_COUNT": self.attempt,
            "TORCHELASTIC_MAX_RESTARTS": self._plan.max_restarts,
            "TORCHELASTIC_RUN_ID": self._meeting.get_run_id(),
            "TORCHELASTIC_USE_AGENT_STORE": bool(self._meeting.use_agent_store),
        }
        if self._meeting.interface and "GLOO_SOCKET_IFNAME" not in self._environment:
            found["GLOO_SOCKET_IFNAME"] = self._meeting.interface
        return {name: str(value) for name, value in found.items()}

    # watching

    def _write_down(self, ends: Sequence[ProcessExit], group: WorkerGroup) -> None:
        """Tell the survivors at once, then keep what is known for the report."""
        fresh = [self._failure(end, group) for end in ends]
        for end, failure in zip(ends, fresh, strict=True):
            self._tell_survivors(failure, alarm=end.exit_code != 0)
        failed = [failure for failure in fresh if failure.exit_code != 0 or self._is_bearing(failure.rank)]
        self.failures += failed
        self._borne += [failure for failure in failed if self._can_do_without(failure)]
        if failed:
            self._meeting.post(self.failures)

    def _failure(self, end: ProcessExit, group: WorkerGroup) -> WorkerFailure:
        outlet = self._outlets[end.local_rank]
        self._seen += 1
        return WorkerFailure(
            rank=group.workers[end.local_rank].global_rank,
            host=self._host,
            pid=end.pid,
            exit_code=end.exit_code,
            seen=end.seen,
            order=self._seen,
            confession=read_worker_error(outlet.confession),
            detail=self._known_of_signal(end.exit_code),
            stack=user_stack(_read_text(outlet.stack)) if end.exit_code < 0 else "",
            log=str(outlet.log) if outlet.log else None,
        )

    def _known_of_signal(self, exit_code: int) -> str:
        if exit_code != -signal.SIGKILL:
            return ""
        now = oom_kill_counts()
        grown = {scope for scope, count in now.items() if count > self._kills.get(scope, count)}
        if "here" in grown:
            return "The kernel's out-of-memory killer ended it: this job used more memory than it may."
        if "host" in grown:
            return "The kernel's out-of-memory killer was at work on this host at the time, so it was probably out of memory."
        if not now:
            return "SIGKILL was sent from outside; whether by the kernel's out-of-memory killer is not known here."
        return "SIGKILL was sent from outside; the kernel's out-of-memory killer has not recorded anything."

    def _keys(self) -> Any:
        """The part of the store that the workers of this attempt use; None while there is none."""
        store = self._meeting.raw_store  # asked once: it may be a connection that is made, and gone the next time
        if store is None:
            return None
        from torch._C._distributed_c10d import PrefixStore

        return PrefixStore(attempt_prefix(self._meeting.get_run_id(), self.attempt), store)

    def _counted(self, key: str) -> int:
        """A counter of the launchers in this attempt."""
        keys = self._keys()
        with contextlib.suppress(RuntimeError):
            return int(keys.get(key)) if keys is not None and keys.check([key]) else 0
        return 0

    def _tell_survivors(self, failure: WorkerFailure, *, alarm: bool) -> None:
        keys = self._keys()
        if keys is None:
            return
        telling = failure.confession or failure.exit_code is None or "killer ended it" in failure.detail
        reason = failure.reason.rstrip(".") if telling else ""  # that a signal came from outside is what the signal's name says
        notice = ExitNotice(failure.rank, failure.host, failure.pid, failure.exit_code, reason)
        with contextlib.suppress(RuntimeError):  # a store that is gone has nobody waiting at it
            keys.set(exit_key(failure.rank), notice.to_json())
            if alarm:
                keys.add(ALARM_KEY, 1)

    def _can_do_without(self, failure: WorkerFailure) -> bool:
        """Whether the others go on: they take over what the process was working on, or it ended because of such a loss.

        The launchers of other machines have to know: they decide about the end of all in the same way.
        """
        keys = self._keys()
        if keys is None or failure.exit_code is None:
            return False
        with contextlib.suppress(RuntimeError):  # a store that is gone has nobody who could go on
            if failure.consequence and self._counted(LOST_HOLDERS_KEY):
                keys.add(FOLLOWED_LOSS_KEY, 1)
                return True
            if self._is_bearing(failure.rank):
                keys.add(LOST_HOLDERS_KEY, 1)
                return True
        return False

    def _is_bearing(self, rank: int) -> bool:
        """Whether a rank was in the middle of items that were handed out to it."""
        keys, key = self._keys(), holds_items_key(rank)
        with contextlib.suppress(RuntimeError):
            return keys is not None and bool(keys.check([key]) and keys.get(key) == b"1")
        return False

    def _notice_lost(self, group: WorkerGroup) -> None:
        """Machines that are gone take their ranks with them, and there is no next attempt without them."""
        here = group.spec.local_world_size
        for machine, host, reason in self._meeting.lost_machines():
            ranks = range(machine * here, (machine + 1) * here)
            if any(failure.rank in ranks for failure in self.failures):
                continue
            lost = lost_machine_failures(ranks, host, reason, time.time())
            for failure in lost:
                self._tell_survivors(failure, alarm=True)
            self.failures += lost
            self._remaining_restarts = 0
            self._meeting.post(self.failures)

    def _let_the_others_raise(self, group: WorkerGroup) -> None:
        """After a failure somewhere: a moment for the survivors, then the end of this attempt."""
        restarting = self._remaining_restarts > 0
        deadline = time.monotonic() + (_GRACE_BEFORE_RESTART if restarting else _GRACE)
        while self._crew.running and time.monotonic() < deadline and self._requests.stop is None:
            self._crew.wait(deadline - time.monotonic(), self._requests.wake)
            self._write_down(self._crew.poll(), group)
            self._tee.pump()
        self._shutdown()
        self._append_tracebacks()
        if restarting:
            told, world = self.everybody(), group.workers[0].world_size
            first, record = first_failure_of_job(told).rank, render_log_record(told, world_size=world)
            text, as_json = render_report(told, world_size=world), self._plan.as_json
            announce(text, as_json=as_json, level=logging.ERROR, rank=first, world=world, record=record)
            self._note(f"slipstream: starting all processes again: attempt {self.attempt + 2} of {self._plan.max_restarts + 1}")

    def _append_tracebacks(self) -> None:
        """A rank's own log ends with its own traceback; the terminal shows only the first one."""
        for failure in self.failures:
            if failure.log and failure.confession and failure.confession.traceback:
                with contextlib.suppress(OSError), open(failure.log, "a", encoding="utf-8", errors="replace") as file:
                    file.write(self._as_written(failure, failure.confession.traceback))

    def _as_written(self, failure: WorkerFailure, traceback: str) -> str:
        """A traceback for the log of a rank: there, too, JSON has one line for it."""
        if not self._plan.as_json:
            return traceback
        return as_json_line(failure.reason, logging.ERROR, failure.rank, self._plan.num_processes, traceback.rstrip())

    def _all_finished(self) -> bool:
        if not self._reported_done:
            self._meeting.finished()
            self._reported_done = True
        return self._meeting.all_finished()


def make_agent(plan: LaunchPlan, meeting: StaticRendezvous | TorchRendezvous, **parts: Any) -> Agent:
    """The agent, as a subclass of torch's; made here so that this room does not import torch before it must."""
    from torch.distributed.elastic.agent.server.api import SimpleElasticAgent, WorkerSpec

    spec = WorkerSpec(
        role=plan.role,
        local_world_size=plan.local_processes,
        rdzv_handler=meeting,  # type: ignore[arg-type] # a foreign one answers the same questions
        entrypoint=plan.target.kind,
        max_restarts=plan.max_restarts,
        monitor_interval=1e-4,  # torch's loop sleeps this long; the real wait is in `_monitor_workers`, and wakes early
    )
    made: Agent = type("ElasticAgent", (Agent, SimpleElasticAgent), {})(spec, plan=plan, meeting=meeting, **parts)
    return made


def unsafe_fork_reason() -> str | None:
    """Why workers must not be forked from this process, now that torch is imported; None when they may."""
    if threading.active_count() > 1:
        return f"{threading.active_count()} threads are running in the launcher"
    for name, part in list(vars(sys.modules["torch"]).items()):
        # each device family that cannot be forked once its driver is up is a module that can say so; asking does not start it
        names = vars(part) if isinstance(part, ModuleType) else {}
        if "_is_in_bad_fork" in names and names.get("is_initialized", bool)():
            return f"importing torch has initialised torch.{name}"
    return None


def _open_for_append(path: str | os.PathLike[str]) -> int:
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)


def _read_text(path: os.PathLike[str]) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError:
        return ""


@dataclass(frozen=True)
class LaunchResult:
    """How a job ended on this machine."""

    exit_code: int
    report: str = ""
    """For the user; empty when all went well."""
    failures: Sequence[WorkerFailure] = field(default=())
    rank: int | None = None
    """The first that failed, if one did."""
    record: tuple[str, str] | None = None
    """The report of failures as the message and the traceback of a log record."""


def launch(plan: LaunchPlan, preload: Sequence[str] = ()) -> int:
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


def _replace_this_process(plan: LaunchPlan) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        os.execvpe(plan.command[0], plan.command, {**environment(), **_single_process_environ(), **plan.environment})
    except OSError as error:
        raise ConfigError(f"{plan.command[0]} cannot be started: {error.strerror}.") from None


def _single_process_environ() -> dict[str, str]:
    """The variables of a job of one process: they overrule what is left of another job, and torch's own start finds them."""
    listener, place = open_listener("127.0.0.1", None)
    listener.close()
    ranks = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", "GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1"}
    meeting = {"MASTER_ADDR": place.host, "MASTER_PORT": str(place.port), "TORCHELASTIC_USE_AGENT_STORE": "False"}
    return {**ranks, **meeting, "TORCHELASTIC_RESTART_COUNT": "0", "TORCHELASTIC_RUN_ID": "none"}


def run_agent(plan: LaunchPlan, preload: Sequence[str] = ()) -> LaunchResult:
    """Become the launcher: start the processes of this machine, watch them until all have ended, and end what they left."""
    tee = parse_tee(plan.tee, plan.local_processes)
    with contextlib.ExitStack() as closing:
        listener = _reserve_port(plan)
        if listener is not None:
            closing.enter_context(listener[0])
        folder = LogFolder(plan.log_dir, f"run-{os.getpid()}", tee, direct=(0,) if plan.console == "main" else ())
        closing.callback(folder.remove)
        _announce_hidden_output(plan, folder)
        set_environ(plan.environment)  # before torch is imported: the number of threads is read then
        plan = _import_torch(plan, preload)
        become_subreaper()
        inherited = open_descriptors() - ({listener[0].fileno()} if listener else set())
        try:
            with capture_signals() as requests:
                return _run_job(plan, requests, folder, inherited, listener)
        finally:
            left = terminate_descendants()
            if left:
                _printer(plan)(f"slipstream: ended what the processes had left behind: {', '.join(left)}")


def _announce_hidden_output(plan: LaunchPlan, folder: LogFolder) -> None:
    """Output that goes to files only must not look lost."""
    ranks = folder.not_shown() if plan.console == "all" else []
    if ranks:
        whose = f"local rank {', '.join(map(str, ranks))}" if len(ranks) < plan.local_processes else "the processes"
        _printer(plan)(f"slipstream: the terminal does not show all output of {whose} (tee={plan.tee}); it is in {folder.path}")


def _reserve_port(plan: LaunchPlan) -> tuple[socket.socket, StoreAddress] | None:
    """Before torch is imported: take the port, or wait until machine 0 has taken it. What cannot work is refused at once."""
    if not plan.meeting.is_own:
        return None
    settings = RendezvousTimeouts.read(plan)
    if plan.hosts_store:
        return open_listener(plan.meeting.host, plan.meeting.port, "main_process_port")
    note = _printer(plan)
    place = StoreAddress(plan.meeting.host, plan.meeting.port or 0)
    wait_for_listener(place, settings.timeout, check=lambda: None, note=lambda text: note(f"slipstream: {text}"))
    return None


def _printer(plan: LaunchPlan) -> Callable[[str], None]:
    def note(text: str) -> None:
        if not plan.quiet:
            announce(text, as_json=plan.as_json, world=plan.num_processes)

    return note


def _import_torch(plan: LaunchPlan, preload: Sequence[str]) -> LaunchPlan:
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

    reason = unsafe_fork_reason()
    if reason is None:
        return plan
    if plan.forced:
        _printer(plan)(f"slipstream: forking as asked, although {reason}")
        return plan
    _printer(plan)(f"slipstream: starting fresh interpreters instead of forking, because {reason}")
    return replace(plan, start_method="spawn", reason=reason)


def _run_job(
    plan: LaunchPlan,
    requests: StopRequests,
    folder: LogFolder,
    inherited: frozenset[int],
    listener: tuple[socket.socket, StoreAddress] | None,
) -> LaunchResult:

    note = _printer(plan)
    meeting = _open_rendezvous(plan, requests, note, listener)
    agent = make_agent(plan, meeting, requests=requests, folder=folder, inherited=inherited, environment=environment(), note=note)
    try:
        result = agent.run()
        told = agent.everybody() if result is not None and result.is_failed() else []
    except StopRequested as stop:
        return _stopped_result(plan, stop.signum)
    except MachineLostError as lost:
        return LaunchResult(lost.exit_code, f"slipstream: {lost}")
    finally:
        meeting.shutdown()
    if not told:
        return LaunchResult(0)
    attempts = agent.attempt + 1
    report = render_report(told, world_size=plan.num_processes, attempts=attempts)
    record = render_log_record(told, world_size=plan.num_processes, attempts=attempts)
    failures = [failure for failures in told for failure in failures]
    first = first_failure_of_job(told)
    return LaunchResult(exit_status(first.exit_code), report, failures, first.rank, record)


def _open_rendezvous(
    plan: LaunchPlan, requests: StopRequests, note: Callable[[str], None], listener: tuple[socket.socket, StoreAddress] | None
) -> StaticRendezvous | TorchRendezvous:
    from slipstream.launch.rendezvous import static_rendezvous, torch_rendezvous

    if plan.meeting.is_own:
        return static_rendezvous(plan, requests.check, lambda text: note(f"slipstream: {text}"), listener)
    return torch_rendezvous(plan, requests.check)


def _stopped_result(plan: LaunchPlan, signum: signal.Signals) -> LaunchResult:
    count = f"{plan.local_processes} process{'es' if plan.local_processes > 1 else ''}"
    return LaunchResult(128 + signum, f"slipstream: stopped by {signum.name}; {count} ended.")
