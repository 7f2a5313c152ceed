"""Carry out a launch plan: one process is exec'd, several run under torch's elastic agent with workers that we fork, watch and stop.

`launch` is what the command line calls; `run_agent` turns this process into the launcher and returns when every process that it started
has ended. torch's `SimpleElasticAgent` runs the loop (rendezvous, start, monitor, restart); `Agent` implements the operations that it
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
import math
import os
import re
import signal
import socket
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
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
from slipstream.launch.output import LogFolder, Tee, WorkerFiles, announce, as_json_line, flush_streams, parse_tee
from slipstream.launch.plan import LOOPBACK, LaunchPlan, Target
from slipstream.launch.rendezvous import MachineLostError, RendezvousTimeouts, StaticRendezvous, TorchRendezvous, make_rendezvous
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
from slipstream.launch.worker_main import ERROR_FILE_VARIABLE, SCRATCH_VARIABLE, STACK_FILE_VARIABLE, ForkedWorker, set_environ
from slipstream.launch.worker_processes import (
    KILL_AFTER,
    OpenFile,
    ProcessExit,
    StopRequested,
    StopRequests,
    WorkerProcesses,
    become_subreaper,
    capture_signals,
    occupy_standard_streams,
    oom_kill_counts,
    open_files,
    terminate_descendants,
)

__all__ = ["Agent", "LaunchResult", "launch", "make_agent", "modules_to_preload", "run_agent", "unsafe_fork_reason"]


if TYPE_CHECKING:
    from torch.distributed.elastic.agent.server.api import RunResult, SimpleElasticAgent as _Agent, Worker as Rank, WorkerGroup, WorkerSpec
else:
    _Agent = object

_GRACE: Final = 1.0
"""Seconds that the survivors of a failure get to raise their own errors."""
_GRACE_BEFORE_RESTART: Final = 0.3
_CAUSE_WAIT: Final = 3.0
"""Seconds that they get while nobody has failed but because of another: that one may be late to report."""
_INTERRUPT_WAIT: Final = 5.0
"""Seconds that workers get to end after SIGINT to the launcher was passed on to them."""
_STOP_WAIT: Final = 10.0
"""The same for other signals."""
_OWN_MODULES: Final = (
    "slipstream.accelerator.accelerator",
    "slipstream.observability.guards.replicas",
    "slipstream.strategies.ddp",
    "psutil",
)
"""What `Accelerator()`, `prepare` and a training step import; tests/launch/test_launch_preload.py compares."""
_USES_SLIPSTREAM: Final = re.compile(rb"slipstream|accelerate|Trainer")
_OPTIMIZES: Final = re.compile(rb"\boptim\b|prepare|DistributedDataParallel|\bTrainer\b")
_SETS_COMPILER_VARIABLES: Final = re.compile(rb"TORCHDYNAMO|TORCHINDUCTOR")


# torch internals: torch's agent calls the methods with a leading underscore and counts `_remaining_restarts`; it has no public way to
# start processes differently. Tried on torch 2.13; every test in tests/launched notices. It can go when torch has such an interface.
class Agent(_Agent):
    """The methods that torch's agent leaves open; `make_agent` combines them with torch's class."""

    def __init__(
        self,
        spec: WorkerSpec,
        *,
        plan: LaunchPlan,
        rendezvous: StaticRendezvous | TorchRendezvous,
        requests: StopRequests,
        folder: LogFolder,
        inherited: frozenset[OpenFile],
        environment: Mapping[str, str],
        log: Callable[[str], None],
    ) -> None:
        super().__init__(spec)
        self._plan = plan
        self._rdzv = rendezvous
        self._requests = requests
        self._folder = folder
        self._inherited = inherited
        self._environment = environment
        self._log = log
        self._host = socket.gethostname()
        self._processes = WorkerProcesses()
        self._tee = Tee(log)
        self._tee_is_behind = False
        self._worker_files: dict[int, WorkerFiles] = {}
        self._oom_kills: dict[str, int] = {}
        self._exit_count = 0
        self._marked_finished = False
        self._tolerated: list[WorkerFailure] = []
        """The failures that do not end the attempt: ranks whose items the others take over, and what followed from them."""
        self.failures: list[WorkerFailure] = []
        """How the processes of this machine failed in the last attempt."""

    @property
    def attempt(self) -> int:
        return max(0, self._rdzv.generation)

    def failures_by_machine(self) -> list[list[WorkerFailure]]:
        """Return the failures of the last attempt, one list per machine, the first machine to fail first."""
        return self._rdzv.published() or ([self.failures] if self.failures else [])

    # called by torch's agent

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        self._processes, self.failures, self._tolerated, self._exit_count, self._marked_finished = WorkerProcesses(), [], [], 0, False
        self._oom_kills = oom_kill_counts()
        if isinstance(self._rdzv, StaticRendezvous):  # a failure anywhere costs every machine one attempt
            self._remaining_restarts = self._plan.max_restarts - self.attempt
        if self.attempt > 0:
            self._folder.end_attempt(self.attempt - 1)
        for rank in worker_group.workers:
            self._start(rank, worker_group)
        return dict(self._processes.pids)

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        from torch.distributed.elastic.agent.server.api import RunResult, WorkerState

        self._processes.wait(0.0 if self._tee_is_behind else self._plan.monitor_interval, self._requests.wake)
        self._tee_is_behind = self._tee.pump()
        self._requests.check()
        self._record_exits(self._processes.poll(), worker_group)
        self._rdzv.send_heartbeat()
        self._record_lost_machines(worker_group)
        if len(self.failures) > len(self._tolerated) or (self._rdzv.has_news() and self._others_failed()):
            self._end_attempt(worker_group)
            return RunResult(state=WorkerState.FAILED)
        if not self._processes.running and self._all_finished():
            return RunResult(state=self._final_state(worker_group))
        return RunResult(state=WorkerState.HEALTHY)

    def _final_state(self, group: WorkerGroup) -> Any:
        """Return the state of the attempt after all processes of this machine have ended without a failure that ends the others."""
        from torch.distributed.elastic.agent.server.api import WorkerState

        if not self._tolerated and not self._read_counter(LOST_HOLDERS_KEY):
            return WorkerState.SUCCEEDED
        if not self._read_counter(FOLLOWED_LOSS_KEY) and self._read_counter(LOST_HOLDERS_KEY) < group.workers[0].world_size:
            self._remaining_restarts = 0  # the others have done all the work
        self._end_attempt(group)
        return WorkerState.FAILED

    def _others_failed(self) -> bool:
        """Return whether a machine has failures that are not tolerated."""
        return sum(map(len, self._rdzv.published())) > self._read_counter(LOST_HOLDERS_KEY) + self._read_counter(FOLLOWED_LOSS_KEY)

    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        self._shutdown()

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = 30) -> None:
        """End the running workers, with the signal that the launcher received if there was one. torch's timeout is not used."""
        received = self._requests.stop
        seconds = KILL_AFTER if received is None else _INTERRUPT_WAIT if received == signal.SIGINT else _STOP_WAIT
        kill_now, wake = self._requests.kill_requested, self._requests.wake
        self._processes.stop(signum=received or death_sig, wait_before_kill=seconds, kill_now=kill_now, wake=wake)
        self._tee.finish(self._patience_with_terminal)

    def _patience_with_terminal(self) -> float:
        """Return the seconds for which a terminal that takes no output is waited for."""
        return math.inf if self._requests.stop is None else 0.0 if self._requests.kill_requested() else KILL_AFTER

    def _exit_barrier(self) -> None:
        if isinstance(self._rdzv, TorchRendezvous):
            super()._exit_barrier()  # type: ignore[no-untyped-call] # `_all_finished` has waited where the rendezvous is our own

    def _assign_worker_ranks(self, store: Any, group_rank: int, group_world_size: int, spec: WorkerSpec) -> list[Rank]:
        if isinstance(self._rdzv, TorchRendezvous):
            ranks: list[Rank] = super()._assign_worker_ranks(store, group_rank, group_world_size, spec)
            return ranks
        from torch.distributed.elastic.agent.server.api import Worker as Rank

        here, world = spec.local_world_size, spec.local_world_size * group_world_size
        first = group_rank * here
        return [Rank(local, first + local, first + local, world, world) for local in range(here)]

    def _record_worker_events(self, result: RunResult) -> None:
        """Do nothing: torch looks up the full host name for these events, which may take seconds, and then drops them."""

    @contextlib.contextmanager
    def record_duration(self, state: str) -> Iterator[None]:
        yield

    def _construct_event(self, state: str, source: Any, *_: Any, **__: Any) -> Any:
        from torch.distributed.elastic.events.api import Event

        return Event(state, source=source)

    # starting

    def _start(self, rank: Rank, group: WorkerGroup) -> None:
        files = self._folder.worker_files(self.attempt, rank.global_rank, rank.local_rank)
        self._worker_files[rank.local_rank] = files
        internal = {ERROR_FILE_VARIABLE: str(files.error), STACK_FILE_VARIABLE: str(files.stack), SCRATCH_VARIABLE: str(files.scratch)}
        internal[OUTPUT_VARIABLE] = self._worker_output(files).dump()
        environment = {**self._environment, **self._rank_environment(rank, group), **internal}
        silent = self._plan.console == "main" and rank.global_rank != 0
        stdout, stderr = (_open_for_append(path or os.devnull) if path or silent else None for path in (files.stdout, files.stderr))
        if self._plan.start_method == "fork":
            self._processes.fork(rank.local_rank, self._forked_worker(environment, stdout, stderr).run)
        else:
            self._processes.execute(rank.local_rank, self._plan.command, environment, stdout, stderr)
        for path, file, terminal in ((files.stdout, stdout, 1), (files.stderr, stderr, 2)):
            if file is not None:
                os.close(file)
            if path is not None and not silent and files.followed & terminal:
                prefix, hidden = f"[{self._plan.role}{rank.global_rank}]:", files.hidden.with_suffix(f".{terminal}")
                self._tee.follow(path, prefix, terminal, hidden=hidden, json_lines=self._plan.as_json)

    def _worker_output(self, files: WorkerFiles) -> WorkerOutput:
        """Return the output settings of a worker; only one whose output is shown may claim a warning for the others."""
        together = self._plan.local_processes > 1 and not self._plan.all_warnings and self._plan.console == "all" and files.is_shown
        claims = str(files.claims) if together else ""
        return WorkerOutput(json=self._plan.as_json, claims=claims, hidden=str(files.hidden), files=files.files)

    def _forked_worker(self, environment: dict[str, str], stdout: int | None, stderr: int | None) -> ForkedWorker:
        return ForkedWorker(
            target=self._plan.target,
            environment=environment,
            stdout=stdout,
            stderr=stderr,
            foreign=open_files() - self._inherited,
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
            "TORCHELASTIC_RUN_ID": self._rdzv.get_run_id(),
            "TORCHELASTIC_USE_AGENT_STORE": bool(self._rdzv.use_agent_store),
        }
        if self._rdzv.interface and "GLOO_SOCKET_IFNAME" not in self._environment:
            found["GLOO_SOCKET_IFNAME"] = self._rdzv.interface
        return {name: str(value) for name, value in found.items()}

    # watching

    def _record_exits(self, ends: Sequence[ProcessExit], group: WorkerGroup) -> None:
        """Notify the survivors first, then keep the failures for the report."""
        exits = [self._failure(end, group) for end in ends]
        for failure in exits:
            self._notify_survivors(failure, alarm=failure.exit_code != 0)
        failed = [failure for failure in exits if failure.exit_code != 0 or self._holds_items(failure.rank)]
        self.failures += failed
        self._tolerated += [failure for failure in failed if self._is_tolerated(failure)]
        if failed:
            self._rdzv.publish(self.failures)

    def _failure(self, end: ProcessExit, group: WorkerGroup) -> WorkerFailure:
        files = self._worker_files[end.local_rank]
        self._exit_count += 1
        return WorkerFailure(
            rank=group.workers[end.local_rank].global_rank,
            host=self._host,
            pid=end.pid,
            exit_code=end.exit_code,
            seen=end.seen,
            order=self._exit_count,
            error=read_worker_error(files.error),
            detail=self._explain_sigkill(end.exit_code),
            stack=user_stack(_read_text(files.stack)) if end.exit_code < 0 else "",
            log=str(files.log) if files.log else None,
        )

    def _explain_sigkill(self, exit_code: int) -> str:
        if exit_code != -signal.SIGKILL:
            return ""
        now = oom_kill_counts()
        grown = {scope for scope, count in now.items() if count > self._oom_kills.get(scope, count)}
        if "here" in grown:
            return "The kernel's out-of-memory killer ended it: this job used more memory than it may."
        if "host" in grown:
            return "The kernel's out-of-memory killer was active on this host at the time, so it was probably out of memory."
        if not now:
            return "SIGKILL was sent from outside; it is unknown whether by the kernel's out-of-memory killer."
        return "SIGKILL was sent from outside; the kernel's out-of-memory killer has not recorded anything."

    def _attempt_store(self) -> Any:
        """Return the part of the store that the workers of this attempt use; None while there is none."""
        store = self._rdzv.raw_store  # read once: it may open a connection each time
        if store is None:
            return None
        from torch._C._distributed_c10d import PrefixStore

        return PrefixStore(attempt_prefix(self._rdzv.get_run_id(), self.attempt), store)

    def _read_counter(self, key: str) -> int:
        """Return a counter that the launchers share in this attempt."""
        store = self._attempt_store()
        with contextlib.suppress(RuntimeError):
            return int(store.get(key)) if store is not None and store.check([key]) else 0
        return 0

    def _notify_survivors(self, failure: WorkerFailure, *, alarm: bool) -> None:
        store = self._attempt_store()
        if store is None:
            return
        is_explained = failure.error or failure.exit_code is None or "killer ended it" in failure.detail
        reason = failure.reason.rstrip(".") if is_explained else ""  # the name of a signal says that it came from outside
        notice = ExitNotice(failure.rank, failure.host, failure.pid, failure.exit_code, reason)
        with contextlib.suppress(RuntimeError):  # the store is gone, so no worker waits at it
            store.set(exit_key(failure.rank), notice.to_json())
            if alarm:
                store.add(ALARM_KEY, 1)

    def _is_tolerated(self, failure: WorkerFailure) -> bool:
        """Return whether the others continue: they take over the items of the process, or it ended because of such a loss.

        The launchers of other machines read the counters, because they decide in the same way.
        """
        store = self._attempt_store()
        if store is None or failure.exit_code is None:
            return False
        followed = failure.consequence and self._read_counter(LOST_HOLDERS_KEY) > 0
        if not followed and not self._holds_items(failure.rank):
            return False
        with contextlib.suppress(RuntimeError):  # without the store no worker can continue
            store.add(FOLLOWED_LOSS_KEY if followed else LOST_HOLDERS_KEY, 1)
            return True
        return False

    def _holds_items(self, rank: int) -> bool:
        """Return whether a rank was working on items that the others take over."""
        return self._read_counter(holds_items_key(rank)) == 1

    def _record_lost_machines(self, group: WorkerGroup) -> None:
        """Record the ranks of machines that were lost; there is no further attempt without them."""
        here = group.spec.local_world_size
        for machine, host, reason in self._rdzv.lost_machines():
            ranks = range(machine * here, (machine + 1) * here)
            if any(failure.rank in ranks for failure in self.failures):
                continue
            lost = lost_machine_failures(ranks, host, reason, time.time())
            for failure in lost:
                self._notify_survivors(failure, alarm=True)
            self.failures += lost
            self._remaining_restarts = 0
            self._rdzv.publish(self.failures)

    def _end_attempt(self, group: WorkerGroup) -> None:
        """Give the survivors of a failure a moment to raise, then end this attempt."""
        restarting, began = self._remaining_restarts > 0, time.monotonic()
        grace = _GRACE_BEFORE_RESTART if restarting else _GRACE
        while self._processes.running and self._requests.stop is None:
            is_explained = any(not failure.consequence for failure in self.failures)
            remaining = began + (grace if is_explained else _CAUSE_WAIT) - time.monotonic()
            if remaining <= 0:
                break
            self._processes.wait(remaining, self._requests.wake)
            self._record_exits(self._processes.poll(), group)
            self._tee.pump()
        self._shutdown()
        self._append_tracebacks()
        if restarting:
            terminate_descendants()  # children of a killed process: they hold its memory and files, and may hold a port
            _print_report(self._plan, _failed_result(self._plan, self.failures_by_machine()))
            self._log(f"starting all processes again: attempt {self.attempt + 2} of {self._plan.max_restarts + 1}")

    def _append_tracebacks(self) -> None:
        """Write the traceback of each failed rank at the end of its log; the terminal shows only the first one."""
        for failure in self.failures:
            if failure.log and failure.error and failure.error.traceback:
                text = failure.error.traceback
                if self._plan.as_json:
                    text = as_json_line(failure.reason, logging.ERROR, failure.rank, self._plan.num_processes, text.rstrip())
                with contextlib.suppress(OSError), open(failure.log, "a", encoding="utf-8", errors="replace") as file:
                    file.write(text)

    def _all_finished(self) -> bool:
        if not self._marked_finished:
            self._rdzv.mark_finished()
            self._marked_finished = True
        return self._rdzv.all_finished()


def make_agent(plan: LaunchPlan, rendezvous: StaticRendezvous | TorchRendezvous, **parts: Any) -> Agent:
    """Return the agent, a subclass of torch's; made here so that importing this module does not import torch."""
    from torch.distributed.elastic.agent.server.api import SimpleElasticAgent, WorkerSpec

    spec = WorkerSpec(
        role=plan.role,
        local_world_size=plan.local_processes,
        rdzv_handler=rendezvous,  # type: ignore[arg-type] # TorchRendezvous has the same methods
        entrypoint=plan.target.kind,
        max_restarts=plan.max_restarts,
        monitor_interval=1e-4,  # torch's loop sleeps this long; the wait that wakes early is in `_monitor_workers`
    )
    made: Agent = type("ElasticAgent", (Agent, SimpleElasticAgent), {})(spec, plan=plan, rendezvous=rendezvous, **parts)
    return made


def unsafe_fork_reason() -> str | None:
    """Return why workers must not be forked from this process, now that torch is imported; None if they may."""
    if threading.active_count() > 1:
        return f"{threading.active_count()} threads are running in the launcher"
    for name, part in list(vars(sys.modules["torch"]).items()):
        # A device family that cannot be forked after its driver has started has a module with this function; asking starts nothing.
        # torch internals: `_is_in_bad_fork` tells these modules apart. Tried on torch 2.13; tests/launch/test_launch_preload.py notices.
        # It can go when torch has a public question for it.
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
    """The text for the user; empty if all processes succeeded."""
    rank: int | None = None
    """The rank that failed first, if one did."""
    record: tuple[str, str] | None = None
    """The report as the message and the traceback of a log record."""


def launch(plan: LaunchPlan) -> int:
    """Carry out a plan, print the report of a failure, and return the exit code. A plan for one process replaces this process."""
    if plan.plugin is not None:
        importlib.import_module(plan.plugin).extension_file()  # built now, and its errors shown, before any process starts
    if plan.single:
        _replace_this_process(plan)
    result = run_agent(plan)
    if result.report:
        _print_report(plan, result)
    return result.exit_code


def _print_report(plan: LaunchPlan, result: LaunchResult) -> None:
    world, level = plan.num_processes, logging.ERROR
    announce(result.report, as_json=plan.as_json, level=level, rank=result.rank, world=world, record=result.record)


def _log(plan: LaunchPlan, text: str) -> None:
    """Print a message of the launcher, unless the plan is quiet."""
    if not plan.quiet:
        announce(f"slipstream: {text}", as_json=plan.as_json, world=plan.num_processes)


def _replace_this_process(plan: LaunchPlan) -> None:
    flush_streams()
    try:
        os.execvpe(plan.command[0], plan.command, {**environment(), **_single_process_environ(), **plan.environment})
    except OSError as error:
        raise ConfigError(f"{plan.command[0]} cannot be started: {error.strerror}.") from None


def _single_process_environ() -> dict[str, str]:
    """Return the variables of a job of one process: they replace those of another job, and `init_process_group` finds them."""
    listener, address = open_listener(LOOPBACK, None)
    listener.close()
    ranks = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", "GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1"}
    rendezvous = {"MASTER_ADDR": address.host, "MASTER_PORT": str(address.port), "TORCHELASTIC_USE_AGENT_STORE": "False"}
    return {**ranks, **rendezvous, "TORCHELASTIC_RESTART_COUNT": "0", "TORCHELASTIC_RUN_ID": "none"}


def run_agent(plan: LaunchPlan) -> LaunchResult:
    """Start the processes of this machine, watch them until all have ended, and end what they left behind."""
    tee = parse_tee(plan.tee, plan.local_processes)
    occupy_standard_streams()
    with contextlib.ExitStack() as closing:
        listener = _reserve_port(plan)
        if listener is not None:
            closing.enter_context(listener[0])
        set_environ(plan.environment)  # before torch is imported: the number of threads is read then
        plan = _import_modules(plan)
        become_subreaper()
        inherited = frozenset(file for file in open_files() if listener is None or file.number != listener[0].fileno())
        requests = closing.enter_context(capture_signals())  # before there is a folder: a signal that ends this process would leave it
        folder = LogFolder(plan.log_dir, f"run-{os.getpid()}", tee, direct=(0,) if plan.console == "main" else ())
        closing.callback(folder.remove)
        _announce_hidden_output(plan, folder)
        closing.callback(_end_left_behind, plan)
        return _run_job(plan, requests, folder, inherited, listener)


def _end_left_behind(plan: LaunchPlan) -> None:
    left = terminate_descendants()
    if left:
        _log(plan, f"ended processes that the workers had left behind: {', '.join(left)}")


def _announce_hidden_output(plan: LaunchPlan, folder: LogFolder) -> None:
    """Print where output is that goes to files only."""
    ranks = folder.not_shown() if plan.console == "all" else []
    if ranks:
        whose = f"local rank {', '.join(map(str, ranks))}" if len(ranks) < plan.local_processes else "the processes"
        _log(plan, f"the terminal does not show all output of {whose} (tee={plan.tee}); it is in {folder.path}")


def _reserve_port(plan: LaunchPlan) -> tuple[socket.socket, StoreAddress] | None:
    """Bind the port, or wait until machine 0 has bound it, before the slow import of torch."""
    spec = plan.rendezvous
    if not spec.is_own:
        return None
    timeouts = RendezvousTimeouts.read(plan)
    if plan.hosts_store:
        return open_listener(spec.host, spec.port, "main_process_port")
    wait_for_listener(StoreAddress(spec.host, spec.port or 0), timeouts.timeout, check=lambda: None, log=partial(_log, plan))
    return None


def modules_to_preload(target: Target) -> list[str]:
    """Return the modules that the workers will need, to be imported once before they are forked.

    The text of the target decides: a program that does not use Slipstream needs none of its modules. The first optimizer of a process,
    and the first DistributedDataParallel, import torch's compiler, which takes as long as torch itself; a program that sets variables of
    the compiler has to do so before that import. The text of a module that is not found below the working directory is unknown.
    """
    path = target.name.replace(".", "/") + ".py" if target.kind == "module" else target.name
    text = b"slipstream"
    with contextlib.suppress(OSError):
        text = Path(path).read_bytes()
    own = _OWN_MODULES if _USES_SLIPSTREAM.search(text) else ()
    return [*own, *(["torch._dynamo"] if _OPTIMIZES.search(text) and not _SETS_COMPILER_VARIABLES.search(text) else [])]


def _import_modules(plan: LaunchPlan) -> LaunchPlan:
    """Import torch once for all workers; return a plan that starts fresh interpreters if fork turned out to be unsafe."""
    gc.disable()  # the import makes very many objects and no garbage
    import torch.distributed.elastic.agent.server.api  # noqa: F401
    import torch.distributed.elastic.rendezvous  # noqa: F401

    for name in modules_to_preload(plan.target) if plan.start_method == "fork" else ():
        importlib.import_module(name)
    if plan.plugin is not None:  # forked workers have it loaded, fresh ones find it built; no device starts here
        plugin = importlib.import_module(plan.plugin)
        plugin.enable() if plan.start_method == "fork" else plugin.extension_file()
    _keep_operators_at_exit()
    gc.enable()
    gc.freeze()  # a collection in a worker would otherwise copy the pages that all workers share
    if plan.start_method != "fork":
        return plan

    reason = unsafe_fork_reason()
    if reason is None:
        return plan
    if plan.forced:
        _log(plan, f"forking as requested, although {reason}")
        return plan
    _log(plan, f"starting fresh interpreters instead of forking, because {reason}")
    return replace(plan, start_method="spawn", reason=reason)


def _keep_operators_at_exit() -> None:
    """Let processes end without undoing torch's registrations of operators.

    That work is lost on a process that ends, takes more time than the fork of a worker, and copies 27 MB that all workers share.
    """
    # The finalizers are listed under a private name in CPython 3.10 to 3.14, and the function is private in torch 2.8 to 2.13;
    # tests/launch/test_launch_preload.py notices. It can go when torch leaves its registrations alone at the end of a process.
    for finalizer in list(weakref.finalize._registry):  # type: ignore[attr-defined]
        alive = finalizer.peek()
        if alive is not None and alive[1].__module__ == "torch.library":
            finalizer.atexit = False


def _run_job(
    plan: LaunchPlan,
    requests: StopRequests,
    folder: LogFolder,
    inherited: frozenset[OpenFile],
    listener: tuple[socket.socket, StoreAddress] | None,
) -> LaunchResult:
    log = partial(_log, plan)
    rendezvous = make_rendezvous(plan, requests.check, log, listener)
    agent = make_agent(plan, rendezvous, requests=requests, folder=folder, inherited=inherited, environment=environment(), log=log)
    try:
        result = agent.run()
        failed = agent.failures_by_machine() if result is not None and result.is_failed() else []
    except StopRequested as stop:
        count = f"{plan.local_processes} process{'es' if plan.local_processes > 1 else ''}"
        return LaunchResult(128 + stop.signum, f"slipstream: stopped by {stop.signum.name}; {count} ended.")
    except MachineLostError as lost:
        return LaunchResult(lost.exit_code, f"slipstream: {lost}")
    finally:
        rendezvous.shutdown()
    return _failed_result(plan, failed, agent.attempt + 1) if failed else LaunchResult(0)


def _failed_result(plan: LaunchPlan, machines: Sequence[Sequence[WorkerFailure]], attempts: int = 1) -> LaunchResult:
    """Return the result of an attempt that failed, from the failures of each machine."""
    first = first_failure_of_job(machines)
    report = render_report(machines, world_size=plan.num_processes, attempts=attempts)
    record = render_log_record(machines, world_size=plan.num_processes, attempts=attempts)
    return LaunchResult(exit_status(first.exit_code), report, first.rank, record)
