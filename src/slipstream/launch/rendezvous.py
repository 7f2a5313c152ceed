"""How the launchers of a job meet, start each attempt together, and notice when one of them is gone.

`OwnRendezvous` is a rendezvous handler for torch's elastic agent, for one machine and for several whose ranks are given. The
launcher of machine 0 serves a store; the others are its clients. Each attempt is a generation with keys of its own, and from
the second one on with a store of its own for the workers, so nobody ever reads what an earlier attempt wrote.

With several machines each launcher also puts down a heartbeat, machine 0 watches those of the others, and whoever cannot
reach machine 0 any more finds out by its connection. What happens anywhere (a failure, an end, a loss) is put on the store and
counted in one number, so that a look at the state of the job is a single small request.

There is no thread here: the agent calls `look` while it waits. On one machine every question is answered without the store.
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
from slipstream.launch.plan import LOOPBACK, Plan
from slipstream.launch.report import Failure
from slipstream.launch.store import Place, connect, interface_of, listen, quietly, serve

if TYPE_CHECKING:
    from torch._C._distributed_c10d import TCPStore
    from torch.distributed.elastic.rendezvous import RendezvousHandler as _Handler, RendezvousInfo
else:
    _Handler = object

__all__ = ["MachineLost", "OwnRendezvous", "Settings", "own_rendezvous"]

_PREFIX: Final = "slipstream/launchers"
_BEAT_EVERY: Final = 1.0
_LOOK_EVERY: Final = 0.2


class MachineLost(LaunchError):
    """The connection to machine 0 is gone."""


@dataclass(frozen=True)
class Settings:
    """What `rdzv_conf` may say for machines whose ranks are given."""

    timeout: float = 60.0
    """Seconds to wait for machine 0 to be there."""
    join_timeout: float = 600.0
    """Seconds that the launchers which are there wait for the rest."""
    heartbeat: float = 15.0
    """Seconds without a sign of life after which a machine counts as lost."""

    @classmethod
    def read(cls, plan: Plan) -> Settings:
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
class _Beats:
    """When each of the other machines was last heard of."""

    counts: dict[int, int] = field(default_factory=dict)
    changed: dict[int, float] = field(default_factory=dict)

    def silent(self, machine: int, count: int, now: float) -> float:
        """For how many seconds the machine has said nothing new."""
        if self.counts.get(machine) != count:
            self.counts[machine] = count
            self.changed[machine] = now
        return now - self.changed[machine]


class OwnRendezvous(_Handler):
    """The verbs of a rendezvous handler; `own_rendezvous` joins them with torch's class."""

    def __init__(
        self,
        plan: Plan,
        check: Callable[[], None],
        note: Callable[[str], None],
        listener: tuple[socket.socket, Place] | None = None,
    ) -> None:
        self._plan = plan
        self._listener = listener
        self._settings = Settings.read(plan)
        self._check = check
        self._note = note
        self._host = socket.gethostname()
        self._run_id = secrets.token_hex(8)
        self._control: TCPStore | None = None
        self._place: Place | None = None
        self._listening_on: str = LOOPBACK
        self._hosts: dict[int, str] = {plan.machine_rank: self._host}
        self._beats = _Beats()
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
            listener, place = self._listener or listen(meeting.host, meeting.port, "main_process_port")
            self._listening_on = listener.getsockname()[0]
            self._control, self._place = serve(listener, place), place
        else:
            self._place = Place(meeting.host, meeting.port or 0)
            self._control = connect(
                self._place, patience=self._settings.timeout, limit=self._settings.heartbeat, check=self._check, note=self._note
            )
        if not self._alone:
            self._introduce()

    def _introduce(self) -> None:
        """Say who we are, find out who the others are, and refuse what does not fit together."""
        self.interface = interface_of(self._plan.meeting.host)
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

    def _open_attempt(self) -> Place:
        """The store of this attempt's workers: the launchers' own at first, then a fresh one each time."""
        assert self._place is not None
        if self.generation == 0:
            self.raw_store = self._control
            return self._place
        if self._plan.hosts_store:
            listener, fresh = listen(self._listening_on, None)
            place = Place(self._place.host, fresh.port)
            self.raw_store = serve(listener, place)
            if not self._alone:
                self._set(f"{self.generation}/port", str(place.port))
            return place
        place = Place(self._place.host, int(self._await_text(f"{self.generation}/port")))
        self.raw_store = connect(place, patience=self._settings.timeout, limit=self._settings.heartbeat, check=self._check)
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
        except MachineLost:
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

    def post(self, failures: Sequence[Failure]) -> None:
        """Tell the other launchers how this machine's processes failed."""
        if self._alone or not failures:
            return
        key = f"{self.generation}/failures/{self._plan.machine_rank}"
        if not self._has(key):
            self._request(lambda store: store.append(f"{_PREFIX}/{self.generation}/order", f"{self._plan.machine_rank},"))
        self._set(key, json.dumps([failure.to_json() for failure in failures]))
        self._request(lambda store: store.add(f"{_PREFIX}/{self.generation}/news", 1))

    def reported(self) -> list[list[Failure]]:
        """What the other launchers have told, one list for each, in the order in which they were the first to tell."""
        if self._alone or not self._has(f"{self.generation}/order"):
            return []
        order = [int(machine) for machine in self._await_text(f"{self.generation}/order").split(",") if machine]
        told = {machine: self._await_text(f"{self.generation}/failures/{machine}") for machine in order}
        return [[Failure.from_json(entry) for entry in json.loads(text)] for text in told.values()]

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
            with quietly():
                return ask(self._control)
        except RuntimeError as error:  # torch.distributed.DistError: closed, refused or silent for too long
            place = f"{self._place.host}, port {self._place.port}" if self._place else "its address"
            raise MachineLost(
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
                raise MachineLost(f"machine 0 answered, but never said {key}; is it a launcher of the same version?")
            time.sleep(0.05)
        text: bytes = self._request(lambda store: store.get(f"{_PREFIX}/{key}"))
        return text.decode()


def own_rendezvous(
    plan: Plan,
    check: Callable[[], None],
    note: Callable[[str], None],
    listener: tuple[socket.socket, Place] | None = None,
) -> OwnRendezvous:
    """The handler, as a subclass of torch's; made here so that this room does not import torch before it must."""
    from torch.distributed.elastic.rendezvous import RendezvousHandler

    made: OwnRendezvous = type("Rendezvous", (OwnRendezvous, RendezvousHandler), {})(plan, check, note, listener)
    return made
