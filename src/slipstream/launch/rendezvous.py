"""Rendezvous handlers for torch's elastic agent: how the launchers of a job meet, start each attempt together, and notice a lost machine.

`StaticRendezvous` serves one machine, or several whose ranks are given. The launcher of machine 0 serves a store and the others are its
clients; each attempt is a generation with its own keys, and from the second on with its own store for the workers. Each launcher
writes a heartbeat; failures, exits and losses are counted in one number, so checking the job is one small request. There is no thread:
the agent calls `has_news` while it waits. `TorchRendezvous` wraps a backend of torch (c10d, etcd, ...) chosen with `--rdzv_backend`; it
cannot tell which process failed on another machine.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Final

from slipstream.errors import ConfigError, LaunchError
from slipstream.launch.failure_report import WorkerFailure
from slipstream.launch.plan import LOOPBACK, LaunchPlan
from slipstream.launch.store import StoreAddress, connect_store, interface_towards, open_listener, serve_store, silence_stderr

if TYPE_CHECKING:
    # torch internals: the stores under the name that type checkers see; torch.distributed has them too, unexported. Tried on torch 2.13;
    # mypy notices a change, and tests/launch/test_launch_store.py. It can go when torch.distributed exports them.
    from torch._C._distributed_c10d import TCPStore
    from torch.distributed.elastic.rendezvous import RendezvousHandler as _Handler, RendezvousInfo
else:
    _Handler = object

__all__ = ["MachineLostError", "RendezvousTimeouts", "StaticRendezvous", "TorchRendezvous", "make_rendezvous"]

_PREFIX: Final = "slipstream/launchers"
_HEARTBEAT_SECONDS: Final = 1.0
_CHECK_SECONDS: Final = 0.2


class MachineLostError(LaunchError):
    """The connection to machine 0 is gone."""


@dataclass(frozen=True)
class RendezvousTimeouts:
    """The settings of `rdzv_conf` for machines whose ranks are given."""

    timeout: float = 60.0
    """Seconds to wait for machine 0."""
    join_timeout: float = 600.0
    """Seconds that the launchers wait for each other."""
    heartbeat: float = 15.0
    """Seconds without a heartbeat after which a machine counts as lost."""

    @classmethod
    def read(cls, plan: LaunchPlan) -> RendezvousTimeouts:
        known = cls.__dataclass_fields__
        for name, text in plan.rendezvous.settings.items():
            if name not in known:
                raise ConfigError(
                    f"rdzv_conf has {name}={text}, which the rendezvous backend static does not support.\nIt supports: {', '.join(known)}."
                )
            try:
                if float(text) <= 0:
                    raise ValueError(text)
            except ValueError:
                raise ConfigError(f"rdzv_conf has {name}={text}, which is not a number of seconds above 0.") from None
        return cls(**{name: float(text) for name, text in plan.rendezvous.settings.items()})


class StaticRendezvous(_Handler):
    """A rendezvous in our own store; `make_rendezvous` combines it with torch's class."""

    def __init__(
        self,
        plan: LaunchPlan,
        check: Callable[[], None],
        log: Callable[[str], None],
        listener: tuple[socket.socket, StoreAddress] | None = None,
    ) -> None:
        self._plan = plan
        self._listener = listener
        self._timeouts = RendezvousTimeouts.read(plan)
        self._check = check
        self._log = log
        self._host = socket.gethostname()
        self._run_id = secrets.token_hex(8)
        self._control: TCPStore | None = None
        self._address: StoreAddress | None = None
        self._listening_on: str = LOOPBACK
        self._hosts: dict[int, str] = {plan.machine_rank: self._host}
        self._heartbeats: dict[int, tuple[int, float]] = {}
        """The last count of each other machine, and when it changed."""
        self._next_heartbeat = self._next_check = 0.0
        self._events_seen = 0
        self._lost: list[tuple[int, str]] = []
        self._registered = False
        """This launcher holds its machine rank in the store."""
        self.generation = -1
        self.raw_store: TCPStore | None = None
        """The store of the workers of this attempt, without a prefix."""
        self.interface: str | None = None
        """The network interface that leads to the other machines."""

    # called by torch's agent

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
        """Do nothing: no machine can join a job whose machines are given."""

    def num_nodes_waiting(self) -> int:
        """Return how many launchers have started the next attempt."""
        return 0 if self._alone else self._number(f"{self.generation + 1}/arrived")

    def shutdown(self) -> bool:
        """Close the stores; the launcher of machine 0 first waits until the others have read what they need."""
        if self._control is not None and self._registered:
            self._await_leaving()
        self.raw_store = self._control = None
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        from torch._C._distributed_c10d import PrefixStore
        from torch.distributed.elastic.rendezvous import RendezvousInfo, RendezvousStoreInfo

        if self._control is None:
            self._open()
        self.generation += 1
        self._events_seen = 0
        address = self._open_attempt()
        if not self._alone:
            self._await_all(f"{self.generation}/arrived", self._timeouts.join_timeout)
        assert self._control is not None
        store = PrefixStore(f"{_PREFIX}/{self.generation}/agent", self._control)
        return RendezvousInfo(store, self._plan.machine_rank, self._plan.num_machines, RendezvousStoreInfo(address.host, address.port))

    # opening

    @property
    def _alone(self) -> bool:
        return self._plan.num_machines == 1

    def _open(self) -> None:
        spec = self._plan.rendezvous
        if self._plan.hosts_store:
            listener, address = self._listener or open_listener(spec.host, spec.port, "main_process_port")
            self._listening_on = listener.getsockname()[0]
            self._control, self._address = serve_store(listener, address), address
        else:
            self._address = StoreAddress(spec.host, spec.port or 0)
            self._control = connect_store(
                self._address, patience=self._timeouts.timeout, limit=self._timeouts.heartbeat, check=self._check, log=self._log
            )
        if not self._alone:
            self._register()

    def _register(self) -> None:
        """Claim the machine rank, and raise if another launcher holds it or the settings differ."""
        self.interface = interface_towards(self._plan.rendezvous.host)
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
                f"and {self._host} (pid {os.getpid()}).\nGive every machine a different rank, from 0 to {self._plan.num_machines - 1}."
            )
        self._registered = True
        self._compare_settings()

    def _compare_settings(self) -> None:
        mine = {"num_machines": self._plan.num_machines, "num_processes": self._plan.num_processes, "max_restarts": self._plan.max_restarts}
        if self._plan.hosts_store:
            self._set("settings", json.dumps(mine))
            return
        theirs = json.loads(self._await_text("settings"))
        for name, value in mine.items():
            if theirs.get(name) != value:
                self._abort(
                    f"The launchers disagree: {name}={theirs.get(name)} on machine 0, "
                    f"{name}={value} on machine {self._plan.machine_rank} ({self._host}).\nGive the same on every machine."
                )

    def _open_attempt(self) -> StoreAddress:
        """Open the store of this attempt's workers: the launchers' own at first, then a fresh one each time."""
        assert self._address is not None
        if self.generation == 0:
            self.raw_store = self._control
            return self._address
        if self._plan.hosts_store:
            listener, fresh = open_listener(self._listening_on, None)
            address = StoreAddress(self._address.host, fresh.port)
            self.raw_store = serve_store(listener, address)
            if not self._alone:
                self._set(f"{self.generation}/port", str(address.port))
            return address
        address = StoreAddress(self._address.host, int(self._await_text(f"{self.generation}/port")))
        self.raw_store = connect_store(address, patience=self._timeouts.timeout, limit=self._timeouts.heartbeat, check=self._check)
        return address

    # waiting for the others

    def _await_all(self, key: str, patience: float) -> None:
        """Announce this launcher and wait for all of them, with a heartbeat meanwhile."""
        self._add(key)
        self._set(f"{key}/{self._plan.machine_rank}", self._host)
        start, noted = time.monotonic(), False
        while self._number(key) < self._plan.num_machines:
            self._check()
            self._stop_if_aborted()
            self.send_heartbeat()
            if self._lost:  # a machine of the attempt before, which cannot come
                raise MachineLostError(self._lost[0][1])
            waited = time.monotonic() - start
            if waited > patience:
                raise ConfigError(
                    f"{self._missing(key)} did not join within {patience:.0f} s.\nTo wait longer: --rdzv_conf join_timeout=3600"
                )
            if waited > 5 and not noted:
                noted = True
                self._log(f"waiting for {self._missing(key)}")
            time.sleep(0.05)
        self._stop_if_aborted()
        for machine in range(self._plan.num_machines):
            self._hosts[machine] = self._await_text(f"{key}/{machine}")

    def _missing(self, key: str) -> str:
        absent = [str(machine) for machine in range(self._plan.num_machines) if not self._has(f"{key}/{machine}")]
        return f"machine{'s' if len(absent) > 1 else ''} {', '.join(absent)}"

    def _abort(self, message: str) -> None:
        """Stop every launcher with an error."""
        self._set("abort", message)
        raise ConfigError(message)

    def _stop_if_aborted(self) -> None:
        if self._has("abort"):
            raise ConfigError(self._await_text("abort"))

    def _await_leaving(self) -> None:
        try:
            gone = self._add("gone")
            deadline = time.monotonic() + 5.0
            there = sum(self._has(f"machine/{machine}") for machine in range(self._plan.num_machines)) - len(self._lost)
            while self._plan.hosts_store and gone < there and time.monotonic() < deadline:
                time.sleep(0.05)
                gone = self._number("gone")
        except MachineLostError:
            return

    # while workers run

    def send_heartbeat(self) -> None:
        """Write a heartbeat, at most once a second; machine 0 checks those of the others."""
        now = time.monotonic()
        if self._alone or now < self._next_heartbeat:
            return
        self._next_heartbeat = now + _HEARTBEAT_SECONDS
        self._add(f"heartbeat/{self._plan.machine_rank}")
        if self._plan.hosts_store:
            self._check_heartbeats(now)

    def _check_heartbeats(self, now: float) -> None:
        limit = self._timeouts.heartbeat
        for machine, host in self._hosts.items():
            if machine == self._plan.machine_rank or any(machine == lost for lost, _ in self._lost):
                continue
            count = self._number(f"heartbeat/{machine}")
            last, since = self._heartbeats.get(machine, (-1, now))
            self._heartbeats[machine] = (count, since if count == last else now)
            if count == last and now - since > limit:
                self._lost.append((machine, f"Machine {machine} (host {host}) sent no heartbeat for {limit:.0f} s."))

    def lost_machines(self) -> list[tuple[int, str, str]]:
        """Return machine, host and reason of the machines that this launcher has found lost."""
        return [(machine, self._hosts.get(machine, "unknown host"), reason) for machine, reason in self._lost]

    def has_news(self) -> bool:
        """Return whether a launcher has published something since the last call."""
        now = time.monotonic()
        if self._alone or now < self._next_check:
            return False
        self._next_check = now + _CHECK_SECONDS
        before, self._events_seen = self._events_seen, self._number(f"{self.generation}/events")
        return before != self._events_seen

    def publish(self, failures: Sequence[WorkerFailure]) -> None:
        """Tell the other launchers how the processes of this machine failed."""
        if self._alone or not failures:
            return
        key = f"{self.generation}/failures/{self._plan.machine_rank}"
        if not self._has(key):
            self._request(lambda store: store.append(f"{_PREFIX}/{self.generation}/order", f"{self._plan.machine_rank},"))
        self._set(key, json.dumps([asdict(failure) for failure in failures]))
        self._add(f"{self.generation}/events")

    def published(self) -> list[list[WorkerFailure]]:
        """Return the failures of every launcher, one list for each, in the order of their first failure."""
        if self._alone or not self._has(f"{self.generation}/order"):
            return []
        order = [int(machine) for machine in self._await_text(f"{self.generation}/order").split(",") if machine]
        texts = [self._await_text(f"{self.generation}/failures/{machine}") for machine in dict.fromkeys(order)]
        return [[WorkerFailure.from_json(failure) for failure in json.loads(text)] for text in texts]

    def mark_finished(self) -> None:
        """Tell the others that the processes of this machine have all succeeded."""
        if not self._alone:
            self._add(f"{self.generation}/finished")

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
            address = f"{self._address.host}, port {self._address.port}" if self._address else "its address"
            raise MachineLostError(
                f"machine 0 ({self._hosts.get(0, 'unknown host')}, {address}) can no longer be reached from {self._host}: "
                f"{str(error).splitlines()[0]}"
            ) from None

    def _set(self, key: str, text: str) -> None:
        self._request(lambda store: store.set(f"{_PREFIX}/{key}", text))

    def _has(self, key: str) -> bool:
        return bool(self._request(lambda store: store.check([f"{_PREFIX}/{key}"])))

    def _add(self, key: str, amount: int = 1) -> int:
        return int(self._request(lambda store: store.add(f"{_PREFIX}/{key}", amount)))

    def _number(self, key: str) -> int:
        return self._add(key, 0)

    def _await_text(self, key: str) -> str:
        """Wait for a key that a launcher is about to write, and return its value."""
        deadline = time.monotonic() + self._timeouts.timeout
        while not self._has(key):
            self._check()
            if time.monotonic() > deadline:
                raise MachineLostError(f"machine 0 answered, but never sent {key}; is it a launcher of the same version?")
            time.sleep(0.05)
        text: bytes = self._request(lambda store: store.get(f"{_PREFIX}/{key}"))
        return text.decode()


def make_rendezvous(
    plan: LaunchPlan,
    check: Callable[[], None],
    log: Callable[[str], None],
    listener: tuple[socket.socket, StoreAddress] | None = None,
) -> StaticRendezvous | TorchRendezvous:
    """Return the handler for the plan's backend; made here so that importing this module does not import torch.

    `check` is called during waits and may raise; `log` receives messages for the user; `listener` is a port that is already bound.
    """
    if not plan.rendezvous.is_own:
        return TorchRendezvous(plan, check)
    from torch.distributed.elastic.rendezvous import RendezvousHandler

    made: StaticRendezvous = type("Rendezvous", (StaticRendezvous, RendezvousHandler), {})(plan, check, log, listener)
    return made


class TorchRendezvous:
    """A backend of torch (c10d, etcd, ...), with the further methods that our agent calls."""

    def __init__(self, plan: LaunchPlan, check: Callable[[], None]) -> None:
        self._handler = _torch_handler(plan)
        self._check = check
        self._address: StoreAddress | None = None
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
        store = info.bootstrap_store_info
        self._address = StoreAddress(store.master_addr, store.master_port) if store is not None else None
        return info

    @property
    def raw_store(self) -> TCPStore | None:
        """A new connection to the store of the workers; None if there is no server."""
        if self._address is None:
            return None
        try:
            return connect_store(self._address, patience=1.0, limit=5.0, check=self._check)
        except (ConfigError, RuntimeError):
            return None

    def send_heartbeat(self) -> None:
        """Do nothing: the backend has its own heartbeats."""

    def has_news(self) -> bool:
        return False

    def publish(self, failures: Sequence[WorkerFailure]) -> None:
        """Do nothing: the other launchers see failures through the backend."""

    def published(self) -> list[list[WorkerFailure]]:
        return []

    def lost_machines(self) -> list[tuple[int, str, str]]:
        return []

    def mark_finished(self) -> None:
        """Do nothing: the exit barrier of torch's agent waits."""

    def all_finished(self) -> bool:
        return True


def _torch_handler(plan: LaunchPlan) -> _Handler:
    """Return the handler of the backend that the plan names, with its settings."""
    from torch.distributed.elastic.rendezvous import RendezvousError, RendezvousParameters
    from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

    spec, settings = plan.rendezvous, dict(plan.rendezvous.settings)
    host = f"[{spec.host}]" if ":" in spec.host else spec.host
    endpoint = settings.pop("endpoint", f"{host}:{spec.port or 0}")
    parameters = RendezvousParameters(
        backend=spec.backend,
        endpoint=endpoint,
        run_id=settings.pop("id", "slipstream"),
        min_nodes=plan.num_machines,
        max_nodes=plan.num_machines,
        **settings,
    )
    try:
        with silence_stderr():
            return get_rendezvous_handler(parameters)
    except (ValueError, ImportError, RuntimeError, RendezvousError) as error:
        raise _rendezvous_error(f"{spec.backend} at {endpoint}", error) from None


def _rendezvous_error(backend: str, error: Exception) -> ConfigError:
    reason = (str(error).splitlines() or [type(error).__name__])[0]
    return ConfigError(
        f"The machines cannot meet through the rendezvous backend {backend} (rdzv_backend): {reason}\n"
        "Check --rdzv_conf, or leave --rdzv_backend out to meet through main_process_ip."
    )
