"""One rank of the pool: run the functions that it is sent, one at a time, and reset the process after each.

An exception becomes a result and never ends the rank; printed output is kept. Before the next run the runtime and torch's process group
are closed, variables, working directory and random states are restored, and leaked threads and child processes are reported. A rank never
returns into the interpreter from which it was forked: the server ends it with `os._exit`.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import os
import random
import signal
import socket
import sys
import time
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from slipstream.devices.memory import clear_after_failure
from slipstream.devices.table import CPU, FAMILIES, set_device
from slipstream.distributed.current import reset
from slipstream.testing import environment, leaks, messages

__all__ = ["STACKS_SIGNAL", "RankProcess", "serve_runs"]

STACKS_SIGNAL: int = getattr(signal, "SIGRTMAX", signal.SIGUSR2)
"""Asks a rank for the stacks of its threads. A late number, so that a library under test keeps the usual ones."""


@dataclass(frozen=True)
class RankProcess:
    """The identity of a forked rank, and its channel."""

    rank: int
    size: int
    run_id: str
    channel: socket.socket
    output: int
    variables: Mapping[str, str]
    """The variables that every run starts from."""
    folder: str
    """The working directory that every run starts in."""


def serve_runs(me: RankProcess) -> None:
    """Serve runs until the test process closes the channel."""
    os.dup2(me.output, 1)
    os.dup2(me.output, 2)
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(line_buffering=True)
    faulthandler.register(STACKS_SIGNAL, file=2, all_threads=True, chain=False)
    with contextlib.suppress(EOFError, ConnectionError):  # the test process has closed the pool, or ended: so do we
        while True:
            _serve_run(me)


def _serve_run(me: RankProcess) -> None:
    header, body = messages.receive(me.channel)
    own = _run_variables(me, header)
    environment.replace(own)
    os.chdir(me.folder)
    _seed()
    _reset_devices()
    before = leaks.observe(variables=own)
    reply, result = _attempt(body)
    sys.stdout.flush()
    sys.stderr.flush()
    messages.send(me.channel, reply, result)
    if reply["kind"] == "value":
        messages.receive(me.channel)  # every rank has finished: until then a peer may still need this one's half of a collective
        close_error = _close_runtime()
    else:
        close_error = _close_runtime()  # at once: peers that wait for this rank learn that it is gone
        messages.receive(me.channel)
    gc.collect()
    left = leaks.wait_for_none(before)
    messages.send(me.channel, {"kind": "clean", "close_error": close_error, "left": left})


def _run_variables(me: RankProcess, header: Mapping[str, Any]) -> dict[str, str]:
    """Return the variables of one run: those of the server, of the rank, and of the test."""
    made = environment.rank_variables(me.rank, me.size, run_id=me.run_id, attempt=header["attempt"], port=header["port"])
    return {**me.variables, **made, **header["environ"]}


def _attempt(body: bytes) -> tuple[dict[str, Any], bytes]:
    import cloudpickle

    try:
        function, args, kwargs = cloudpickle.loads(body)
        value = function(*args, **kwargs)
    except BaseException as error:  # any exception of a test, SystemExit included, is its outcome
        text = "".join(traceback.format_exception(type(error), error, _user_frames(error)))
        return _error_header(error, text), _pickled_error(error)
    return _pickled_value(value)


def _error_header(error: BaseException, text: str) -> dict[str, Any]:
    return {"kind": "error", "when": time.monotonic(), "text": text, "summary": f"{type(error).__qualname__}: {error}"}


def _user_frames(error: BaseException) -> Any:
    return error.__traceback__.tb_next if error.__traceback__ is not None else None


def _pickled_value(value: Any) -> tuple[dict[str, Any], bytes]:
    import cloudpickle

    try:
        return {"kind": "value", "when": time.monotonic()}, messages.dump_on_host(value)
    except Exception as error:
        text = f"the function returned {type(value).__qualname__}, which cannot be pickled ({error}); return plain data or tensors"
        return _error_header(TypeError(text), text), cloudpickle.dumps(TypeError(text))


def _pickled_error(error: BaseException) -> bytes:
    """Return the exception as bytes; one that cannot be pickled and loaded becomes its type and text."""
    import cloudpickle

    try:
        data: bytes = cloudpickle.dumps(error)
        cloudpickle.loads(data)
    except Exception as reason:
        data = cloudpickle.dumps(RuntimeError(f"{type(error).__qualname__}: {error} (it could not be pickled: {reason})"))
    return data


def _seed() -> None:
    random.seed(0)
    sys.modules["torch"].manual_seed(0)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(0)


def _reset_devices() -> None:
    """Take back what the run before has left on devices: the current one, cached memory, failed work. `_seed` has seeded them."""
    clear_after_failure(lambda error: True)
    for family in FAMILIES:
        if family is not CPU and family.indexed and family.may_be_used():
            set_device(sys.modules["torch"].device(family.type, 0))
    if (stand_in := sys.modules.get("torch.standin")) is not None:
        stand_in.reset()


def _close_runtime() -> str:
    """Close what the run opened; return the traceback of a failure, or nothing."""
    try:
        reset()
        distributed = sys.modules["torch.distributed"]
        if distributed.is_available() and distributed.is_initialized():
            distributed.destroy_process_group()
    except Exception:
        return traceback.format_exc()
    return ""
