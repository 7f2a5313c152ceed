"""Meeting through one of torch's own rendezvous backends (c10d, etcd ...), chosen with `--rdzv_backend`.

The backend decides who takes part and when to start again; this wraps it in the questions that our agent asks. What only our
own rendezvous can tell (who failed on another machine, who was lost) is answered with "nothing known".
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from slipstream.errors import ConfigError
from slipstream.launch.plan import Plan
from slipstream.launch.report import Failure
from slipstream.launch.store import Place, connect, quietly

if TYPE_CHECKING:
    from torch._C._distributed_c10d import TCPStore
    from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo

__all__ = ["ForeignRendezvous", "foreign_rendezvous"]


class ForeignRendezvous:
    """A backend of torch, with the further questions of our agent."""

    def __init__(self, handler: RendezvousHandler, check: Callable[[], None]) -> None:
        self._handler = handler
        self._check = check
        self._place: Place | None = None
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
            raise _cannot_meet(self._handler.get_backend(), error) from None
        self.generation += 1
        meeting = info.bootstrap_store_info
        self._place = Place(meeting.master_addr, meeting.master_port) if meeting is not None else None
        return info

    @property
    def raw_store(self) -> TCPStore | None:
        """A connection to the workers' store, or None when nobody serves it any more."""
        if self._place is None:
            return None
        try:
            return connect(self._place, patience=1.0, limit=5.0, check=self._check)
        except (ConfigError, RuntimeError):
            return None

    def beat(self) -> None:
        """The backend has heartbeats of its own."""

    def look(self) -> bool:
        return False

    def post(self, failures: Sequence[Failure]) -> None:
        """The other launchers see for themselves."""

    def reported(self) -> list[list[Failure]]:
        return []

    def lost_machines(self) -> list[tuple[int, str, str]]:
        return []

    def finished(self) -> None:
        """Nobody else needs to know before the exit barrier of torch's agent."""

    def all_finished(self) -> bool:
        return True


def foreign_rendezvous(plan: Plan, check: Callable[[], None]) -> ForeignRendezvous:
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
        with quietly():
            handler = get_rendezvous_handler(parameters)
        return ForeignRendezvous(handler, check)
    except (ValueError, ImportError, RuntimeError, RendezvousError) as error:
        raise _cannot_meet(f"{plan.meeting.backend} at {endpoint}", error) from None


def _cannot_meet(backend: str, error: Exception) -> ConfigError:
    reason = (str(error).splitlines() or [type(error).__name__])[0]
    return ConfigError(
        f"The machines cannot meet through the rendezvous backend {backend} (rdzv_backend): {reason}\n"
        "Check --rdzv_conf, or leave --rdzv_backend out to meet through main_process_ip."
    )
