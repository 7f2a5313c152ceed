"""Rendezvous handlers for torch's elastic agent: how the launchers of a job meet, start each attempt together, and notice a lost machine.

`StaticRendezvous` serves one machine, or several whose ranks are given. The launcher of machine 0 serves a store and the others are its
clients; each attempt is a generation with keys of its own, and from the second on with a store of its own for the workers. Each launcher
writes a heartbeat; failures, exits and losses are counted in one number, so checking the job is one small request. There is no thread:
the agent calls `look` while it waits. `TorchRendezvous` wraps a backend of torch (c10d, etcd, ...) chosen with `--rdzv_backend`; it
cannot tell which process failed on another machine.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from slipstream.errors import ConfigError, LaunchError
from slipstream.launch.failure_report import WorkerFailure
from slipstream.launch.plan import LOOPBACK, LaunchPlan
from slipstream.launch.store import StoreAddress, connect_store, interface_towards, open_listener, serve_store, silence_stderr

if TYPE_CHECKING:
    from torch._C._distributed_c10d import TCPStore
    from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo

__all__ = ["MachineLostError", "RendezvousTimeouts", "StaticRendezvous", "TorchRendezvous", "static_rendezvous", "torch_rendezvous"]


if TYPE_CHECKING:
    from torch._C._distributed_c10d import TCPStore
    from torch.distributed.elastic.rendezvous import RendezvousHandler as _Handler, RendezvousInfo
else:
    _Handler = object

_PREFIX: Final = "slipstream/launchers"
_BEAT_EVERY: Final = 1.0
_LOOK_EVERY: Final = 0.2


class MachineLostError(LaunchError):
    """The connection to machine 0 is gone."""


@dataclass(frozen=True)
class RendezvousTimeouts:
    """What `rdzv_conf` may say for machines whose ranks are given."""

    timeout: float = 60.0
    """Seconds to wait for machine 0 to be there."""
    join_timeout: float = 600.0
    """Seconds that the launchers which are there wait for the rest."""
    heartbeat: float = 15.0
    """Seconds without a sign of life after which a machine counts as lost."""

    @classmethod
    def read(cls, plan: LaunchPlan) -> RendezvousTimeouts:
        known = cls.__dataclass_fields__
        for name, text in plan.meeting.settings.items():
            if name not in known:
                raise ConfigError(
                    f"rdzv_conf has {name}={text}, which the rendezvous backend static does not know.\nIt knows: {', '.join(known)}."
                )
            try:
                if float(text) <= 0:
                    raise ValueError(text)
            except ValueError:
                raise ConfigError(f"rdzv_conf has {name}={text}, which is not a number of seconds above 0.") from None
        return cls(**{name: float(text) for name, text in plan.meeting.settings.items()})


@dataclass
class _Heartbeats:
    """When each of the other machines was last heard of."""

    counts: dict[int, int] = field(default_factory=dict)
    changed: dict[int, float] = field(default_factory=dict)

    def silent(self, machine: int, count: int, now: float) -> float:
        """For how many seconds the machine has said nothing new."""
        if self.counts.get(machine) != count:
            self.counts[machine] = count
            self.changed[machine] = now
        return now - self.changed[machine]


class StaticRendezvous(_Handler):
    """The verbs of a rendezvous handler; `static_rendezvous` joins them with torch's class."""

    def __init__(
        self,
        plan: LaunchPlan,
        check: Callable[[], None],
        note: Callable[[str], None],
        listener: tuple[socket.socket, StoreAddress] | None = None,
    ) -> None:
        self._plan = plan
        self._listener = listener
        self._settings = RendezvousTimeouts.read(plan)
        self._check = check
        self._note = note
        self._host = socket.gethostname()
        self._run_id = secrets.token_hex(8)
        self._control: TCPStore | None = None
        self._place: StoreAddress | None = None
        self._listening_on: str = LOOPBACK
        self._hosts: dict[int, str] = {plan.machine_rank: self._host}
        self._beats = _Heartbeats()
        self._next_beat = self._next_look = 0.0
        self._news_seen = 0
        self._lost: list[tuple[int, str]] = []
        self._counted = False
        """The others know of this launcher as the one with its machine rank."""
        self.generation = -1
        self.raw_store: TCPStore | None = None
        """The store that the workers of this attempt use, without any prefix."""
        self.interface: str | None = None
        """The network interface that leads to the other machines."""

    # what torch's agent asks

    def get_backend(self) -> str:
        return "static"

    @property
    def use_agent_store(self) -> bool:
        return True

    def get_run_id(self) -> str:
        return self._run_id

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        """Nobody may join a job whose machines are given, so there is nothing to close."""

    def num_nodes_waiting(self) -> int:
        """Launchers that have already gone on to the next attempt."""
        return 0 if self._alone else self._number(f"{self.generation + 1}/arrived")

    def shutdown(self) -> bool:
        """Let go of the stores; the launcher of machine 0 first waits a little until the others have read what they need."""
        if self._control is not None and self._counted:
            self._leave_together()
        self.raw_store = self._control = None
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        from torch._C._distributed_c10d import PrefixStore
        from torch.distributed.elastic.rendezvous import RendezvousInfo, RendezvousStoreInfo

        if self._control is None:
            self._open()
        self.generation += 1
        self._news_seen = 0
        place = self._open_attempt()
        if not self._alone:
            self._await_all(f"{self.generation}/arrived", self._settings.join_timeout)
        assert self._control is not None
        store = PrefixStore(f"{_PREFIX}/{self.generation}/agent", self._control)
        return RendezvousInfo(store, self._plan.machine_rank, self._plan.num_machines, RendezvousStoreInfo(place.host, place.port))

    # opening

    @property
    def _alone(self) -> bool:
        return self._plan.num_machines == 1

    def _open(self) -> None:
        meeting = self._plan.meeting
        if self._plan.hosts_store:
            listener, place = self._listener or open_listener(meeting.host, meeting.port, "main_process_port")
            self._listening_on = listener.getsockname()[0]
            self._control, self._place = serve_store(listener, place), place
        else:
            self._place = StoreAddress(meeting.host, meeting.port or 0)
            self._control = connect_store(
                self._place, patience=self._settings.timeout, limit=self._settings.heartbeat, check=self._check, note=self._note
            )
        if not self._alone:
            self._introduce()

    def _introduce(self) -> None:
        """Say who we are, find out who the others are, and refuse what does not fit together."""
        self.interface = interface_towards(self._plan.meeting.host)
        if self._plan.hosts_store:
            self._set("run", self._run_id)
        else:
            self._run_id = self._await_text("run")
        mine = json.dumps({"host": self._host, "pid": os.getpid(), "nonce": secrets.token_hex(4)})
        holder = self._request(lambda store: store.compare_set(f"{_PREFIX}/machine/{self._plan.machine_rank}", "", mine)).decode()
        if holder != mine:
            other = json.loads(holder)
            self._abort(
                f"Two launchers have machine_rank={self._plan.machine_rank}: {other['host']} (pid {other['pid']}) "
                f"and {self._host} (pid {os.getpid()}).\nGive every machine a rank of its own, from 0 to {self._plan.num_machines - 1}."
            )
        self._counted = True
        self._compare_terms()

    def _compare_terms(self) -> None:
        mine = {"num_machines": self._plan.num_machines, "num_processes": self._plan.num_processes, "max_restarts": self._plan.max_restarts}
        if self._plan.hosts_store:
            self._set("terms", json.dumps(mine))
            return
        theirs = json.loads(self._await_text("terms"))
        for name, value in mine.items():
            if theirs.get(name) != value:
                self._abort(
                    f"The launchers disagree: {name}={theirs.get(name)} on machine 0, "
                    f"{name}={value} on machine {self._plan.machine_rank} ({self._host}).\nGive the same on every machine."
                )

    def _open_attempt(self) -> StoreAddress:
        """The store of this attempt's workers: the launchers' own at first, then a fresh one each time."""
        assert self._place is not None
        if self.generation == 0:
            self.raw_store = self._control
            return self._place
        if self._plan.hosts_store:
            listener, fresh = open_listener(self._listening_on, None)
            place = StoreAddress(self._place.host, fresh.port)
            self.raw_store = serve_store(listener, place)
            if not self._alone:
                self._set(f"{self.generation}/port", str(place.port))
            return place
        place = StoreAddress(self._place.host, int(self._await_text(f"{self.generation}/port")))
        self.raw_store = connect_store(place, patience=self._settings.timeout, limit=self._settings.heartbeat, check=self._check)
        return place

    # meeting the others

    def _await_all(self, key: str, patience: float) -> None:
        """Count ourselves in and wait until every launcher has; keeps up the heartbeat meanwhile."""
        self._request(lambda store: store.add(f"{_PREFIX}/{key}", 1))
        self._set(f"{key}/{self._plan.machine_rank}", self._host)
        start, said = time.monotonic(), False
        while self._number(key) < self._plan.num_machines:
            self._check()
            self._stop_if_aborted()
            self.beat()
            waited = time.monotonic() - start
            if waited > patience:
                raise ConfigError(
                    f"{self._missing(key)} did not come within {patience:.0f} s.\nTo wait longer: --rdzv_conf join_timeout=3600"
                )
            if waited > 5 and not said:
                said = True
                self._note(f"waiting for {self._missing(key)}")
            time.sleep(0.05)
        self._stop_if_aborted()
        for machine in range(self._plan.num_machines):
            self._hosts[machine] = self._await_text(f"{key}/{machine}")

    def _missing(self, key: str) -> str:
        absent = [str(machine) for machine in range(self._plan.num_machines) if not self._has(f"{key}/{machine}")]
        return f"machine{'s' if len(absent) > 1 else ''} {', '.join(absent)}"

    def _abort(self, message: str) -> None:
        """Tell everybody that it cannot work, and stop."""
        self._set("abort", message)
        raise ConfigError(message)

    def _stop_if_aborted(self) -> None:
        if self._has("abort"):
            raise ConfigError(self._await_text("abort"))

    def _leave_together(self) -> None:
        try:
            gone = self._request(lambda store: store.add(f"{_PREFIX}/gone", 1))
            deadline = time.monotonic() + 5.0
            there = sum(self._has(f"machine/{machine}") for machine in range(self._plan.num_machines)) - len(self._lost)
            while self._plan.hosts_store and gone < there and time.monotonic() < deadline:
                time.sleep(0.05)
                gone = self._number("gone")
        except MachineLostError:
            return

    # while workers run

    def beat(self) -> None:
        """A sign of life, at most once a second."""
        now = time.monotonic()
        if self._alone or now < self._next_beat:
            return
        self._next_beat = now + _BEAT_EVERY
        self._request(lambda store: store.add(f"{_PREFIX}/beat/{self._plan.machine_rank}", 1))
        if self._plan.hosts_store:
            self._listen_for_others(now)

    def _listen_for_others(self, now: float) -> None:
        limit = self._settings.heartbeat
        for machine, host in self._hosts.items():
            if machine == self._plan.machine_rank or any(machine == lost for lost, _ in self._lost):
                continue
            if self._beats.silent(machine, self._number(f"beat/{machine}"), now) > limit:
                self._lost.append((machine, f"Nothing was heard of machine {machine} (host {host}) for {limit:.0f} s."))

    def lost_machines(self) -> list[tuple[int, str, str]]:
        """Machine, host and reason of those that are gone, as far as this launcher has noticed itself."""
        return [(machine, self._hosts.get(machine, "unknown host"), reason) for machine, reason in self._lost]

    def look(self) -> bool:
        """Whether something has happened in this attempt anywhere that this launcher has not looked at yet."""
        now = time.monotonic()
        if self._alone or now < self._next_look:
            return False
        self._next_look = now + _LOOK_EVERY
        news = self._number(f"{self.generation}/news")
        fresh = news != self._news_seen
        self._news_seen = news
        return fresh

    def post(self, failures: Sequence[WorkerFailure]) -> None:
        """Tell the other launchers how this machine's processes failed."""
        if self._alone or not failures:
            return
        key = f"{self.generation}/failures/{self._plan.machine_rank}"
        if not self._has(key):
            self._request(lambda store: store.append(f"{_PREFIX}/{self.generation}/order", f"{self._plan.machine_rank},"))
        self._set(key, json.dumps([failure.to_json() for failure in failures]))
        self._request(lambda store: store.add(f"{_PREFIX}/{self.generation}/news", 1))

    def reported(self) -> list[list[WorkerFailure]]:
        """What the other launchers have told, one list for each, in the order in which they were the first to tell."""
        if self._alone or not self._has(f"{self.generation}/order"):
            return []
        order = [int(machine) for machine in self._await_text(f"{self.generation}/order").split(",") if machine]
        told = {machine: self._await_text(f"{self.generation}/failures/{machine}") for machine in order}
        return [[WorkerFailure.from_json(entry) for entry in json.loads(text)] for text in told.values()]

    def finished(self) -> None:
        """This machine's processes have all ended well."""
        if not self._alone:
            self._request(lambda store: store.add(f"{_PREFIX}/{self.generation}/finished", 1))

    def all_finished(self) -> bool:
        return self._alone or self._number(f"{self.generation}/finished") >= self._plan.num_machines

    # requests to the launchers' store

    def _request(self, ask: Callable[[Any], Any]) -> Any:
        try:
            if self._plan.hosts_store:
                return ask(self._control)
            with silence_stderr():
                return ask(self._control)
        except RuntimeError as error:  # torch.distributed.DistError: closed, refused or silent for too long
            place = f"{self._place.host}, port {self._place.port}" if self._place else "its address"
            raise MachineLostError(
                f"machine 0 ({self._hosts.get(0, 'unknown host')}, {place}) cannot be reached any more from {self._host}: "
                f"{str(error).splitlines()[0]}"
            ) from None

    def _set(self, key: str, text: str) -> None:
        self._request(lambda store: store.set(f"{_PREFIX}/{key}", text))

    def _has(self, key: str) -> bool:
        return bool(self._request(lambda store: store.check([f"{_PREFIX}/{key}"])))

    def _number(self, key: str) -> int:
        return int(self._request(lambda store: store.add(f"{_PREFIX}/{key}", 0)))

    def _await_text(self, key: str) -> str:
        """The value of a key that a launcher is about to write."""
        deadline = time.monotonic() + self._settings.timeout
        while not self._has(key):
            self._check()
            if time.monotonic() > deadline:
                raise MachineLostError(f"machine 0 answered, but never said {key}; is it a launcher of the same version?")
            time.sleep(0.05)
        text: bytes = self._request(lambda store: store.get(f"{_PREFIX}/{key}"))
        return text.decode()


def static_rendezvous(
    plan: LaunchPlan,
    check: Callable[[], None],
    note: Callable[[str], None],
    listener: tuple[socket.socket, StoreAddress] | None = None,
) -> StaticRendezvous:
    """The handler, as a subclass of torch's; made here so that this room does not import torch before it must."""
    from torch.distributed.elastic.rendezvous import RendezvousHandler

    made: StaticRendezvous = type("Rendezvous", (StaticRendezvous, RendezvousHandler), {})(plan, check, note, listener)
    return made


class TorchRendezvous:
    """A backend of torch, with the further questions of our agent."""

    def __init__(self, handler: RendezvousHandler, check: Callable[[], None]) -> None:
        self._handler = handler
        self._check = check
        self._place: StoreAddress | None = None
        self.generation = -1
        self.interface: str | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._handler, name)

    def next_rendezvous(self) -> RendezvousInfo:
        from torch.distributed.elastic.rendezvous import RendezvousError, RendezvousGracefulExitError

        try:
            info = self._handler.next_rendezvous()
        except RendezvousGracefulExitError:
            raise
        except RendezvousError as error:
            raise _rendezvous_error(self._handler.get_backend(), error) from None
        self.generation += 1
        meeting = info.bootstrap_store_info
        self._place = StoreAddress(meeting.master_addr, meeting.master_port) if meeting is not None else None
        return info

    @property
    def raw_store(self) -> TCPStore | None:
        """A connection to the workers' store, or None when nobody serves it any more."""
        if self._place is None:
            return None
        try:
            return connect_store(self._place, patience=1.0, limit=5.0, check=self._check)
        except (ConfigError, RuntimeError):
            return None

    def beat(self) -> None:
        """The backend has heartbeats of its own."""

    def look(self) -> bool:
        return False

    def post(self, failures: Sequence[WorkerFailure]) -> None:
        """The other launchers see for themselves."""

    def reported(self) -> list[list[WorkerFailure]]:
        return []

    def lost_machines(self) -> list[tuple[int, str, str]]:
        return []

    def finished(self) -> None:
        """Nobody else needs to know before the exit barrier of torch's agent."""

    def all_finished(self) -> bool:
        return True


def torch_rendezvous(plan: LaunchPlan, check: Callable[[], None]) -> TorchRendezvous:
    """The backend that the plan names, with its settings."""
    from torch.distributed.elastic.rendezvous import RendezvousError, RendezvousParameters
    from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

    settings = dict(plan.meeting.settings)
    host = f"[{plan.meeting.host}]" if ":" in plan.meeting.host else plan.meeting.host
    endpoint = settings.pop("endpoint", f"{host}:{plan.meeting.port or 0}")
    parameters = RendezvousParameters(
        backend=plan.meeting.backend,
        endpoint=endpoint,
        run_id=settings.pop("id", "slipstream"),
        min_nodes=plan.num_machines,
        max_nodes=plan.num_machines,
        **settings,
    )
    try:
        with silence_stderr():
            handler = get_rendezvous_handler(parameters)
        return TorchRendezvous(handler, check)
    except (ValueError, ImportError, RuntimeError, RendezvousError) as error:
        raise _rendezvous_error(f"{plan.meeting.backend} at {endpoint}", error) from None


def _rendezvous_error(backend: str, error: Exception) -> ConfigError:
    reason = (str(error).splitlines() or [type(error).__name__])[0]
    return ConfigError(
        f"The machines cannot meet through the rendezvous backend {backend} (rdzv_backend): {reason}\n"
        "Check --rdzv_conf, or leave --rdzv_backend out to meet through main_process_ip."
    )
