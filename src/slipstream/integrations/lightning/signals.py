"""How a run ends early: all ranks of a fit stop before the same batch when one was told to end (SIGTERM), and none outlives a failure.

Lightning's handler of the signal broadcasts a tensor from within, and its loop broadcasts one before every batch. A rank that was told
alone would then take the tensors of one collective for those of another. Here the handler only takes a note. Ranks of a data-parallel run
wait for each other in every backward pass anyway, so they ask each other about once a second, in one guarded call, and agree in it after
how many batches they ask again (`SignalAgreement`). Processes that Lightning started are ended if they are still there some seconds after
the one that started them has failed (`end_children`).
"""

from __future__ import annotations

import contextlib
import subprocess
import time
from collections.abc import Callable, Sequence
from typing import Any

from lightning.pytorch.utilities.exceptions import SIGTERMException

from slipstream.distributed import collectives
from slipstream.integrations.lightning.runtime import HostedRuntime

__all__ = ["SignalAgreement", "end_children"]

_INTERVAL = 1.0
_MOST_BATCHES = 256
_PATIENCE = 5.0


class SignalAgreement:
    """Called before every training batch; raises Lightning's `SIGTERMException` on all ranks together."""

    def __init__(self, runtime: HostedRuntime, trainer: Any, clock: Callable[[], float] = time.monotonic) -> None:
        self._runtime = runtime
        self._trainer = trainer
        self._clock = clock
        self._told = False
        self._left = 0
        self._batches = 0
        self._asked: float | None = None

    def install(self, *, fits: bool) -> None:
        """Take the place of Lightning's handler and, where a model is fitted, of the broadcast before every batch."""
        # Lightning internals: `_sigterm_notifier_fn` of the signal connector and `_broadcast_sigterm_tensor` of the epoch loop (lightning
        # 2.6.6) have no public names. tests/integrations/test_lightning.py notices a change; this can go when Lightning asks the strategy.
        self._trainer._signal_connector._sigterm_notifier_fn = self.note if fits else self.note_locally
        if fits:
            self._trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = self

    def note(self, signum: Any, frame: Any = None) -> None:
        """Take a note of the signal, and pass it on to processes that this one started."""
        launcher = self._trainer.strategy.launcher
        if not self._told and launcher is not None:
            launcher.kill(signum)
        self._told = True

    def note_locally(self, signum: Any, frame: Any = None) -> None:
        """Let this rank stop by itself: in an evaluation ranks need not wait for each other."""
        self.note(signum)
        self._trainer._signal_connector.received_sigterm = True

    def __call__(self) -> None:
        """Ask the other ranks, if it is time."""
        if self._left:
            self._left -= 1
            return
        now = self._clock()
        per_batch = _INTERVAL if self._asked is None else (now - self._asked) / self._batches
        state = self._runtime.components.state
        stop, slowest = collectives.reduce(
            state.channel(), state.limits, [float(self._told), per_batch], "max", operation="agree on SIGTERM"
        )
        if stop:
            self._trainer._signal_connector.received_sigterm = True
            raise SIGTERMException
        self._batches = min(_MOST_BATCHES, max(1, int(_INTERVAL / max(slowest, 1e-6))))
        self._left, self._asked = self._batches - 1, now


def end_children(processes: Sequence[subprocess.Popen[bytes]], patience: float = _PATIENCE) -> None:
    """Wait until processes have ended, and kill those that have not: they hear of a failure only in their next collective.

    >>> import sys
    >>> child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"])
    >>> end_children([child], patience=0.1)
    >>> child.returncode
    -9
    """
    deadline = time.monotonic() + patience
    for process in processes:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(max(0.0, deadline - time.monotonic()))
    for process in processes:
        if process.poll() is None:
            process.kill()
            process.wait()
