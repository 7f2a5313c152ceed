"""The Python stack of a process on this host that cannot answer: stopped, or its interpreter held by foreign code.

`faulthandler` writes a stack from inside a C signal handler, so it needs no help of the interpreter. Each process points it
at an anonymous file in memory; whoever may signal the process may also read that file through /proc. Linux only; elsewhere,
and where the signal is taken, there is no stack and the report says nothing about one. psutil is imported when it is needed, which is
in a process of several, after the start.
"""

from __future__ import annotations

import faulthandler
import os
import re
import signal
import threading
import time
from typing import Any

from slipstream.comm.sites import Line, is_of_the_user, relevant

__all__ = ["StackSignal", "process_state", "signalled_stack"]


class StackSignal:
    """Registers this process to write its stack on a signal, and takes that back."""

    def __init__(self) -> None:
        self._file: int | None = None
        self._number = 0

    def install(self) -> None:
        if not hasattr(os, "memfd_create") or self._file is not None:
            return
        number = int(signal.SIGRTMAX) - 2  # a real-time signal that neither schedulers nor users' handlers claim
        if signal.getsignal(number) not in (signal.SIG_DFL, None):
            return
        self._file, self._number = os.memfd_create("slipstream-stack"), number
        faulthandler.register(number, file=self._file, all_threads=True, chain=False)

    def note(self) -> dict[str, Any]:
        """What another process needs to know in order to ask."""
        if self._file is None:
            return {}
        import psutil

        thread = f"0x{threading.main_thread().ident or 0:016x}"
        return {"stack_signal": self._number, "stack_file": self._file, "stack_thread": thread, "started": psutil.Process().create_time()}

    def remove(self) -> None:
        if self._file is not None:
            faulthandler.unregister(self._number)
            os.close(self._file)
            self._file = None


def process_state(note: dict[str, Any]) -> str | None:
    """What the operating system says of a process on this host: "stopped by a signal", "gone"; None when it simply runs."""
    import psutil

    try:
        process = psutil.Process(note["pid"])
        if "started" in note and abs(process.create_time() - note["started"]) > 1:
            return f"process {note['pid']} is gone"
        status = process.status()
    except psutil.NoSuchProcess:
        return f"process {note['pid']} is gone"
    except psutil.AccessDenied:
        return None
    words = {
        psutil.STATUS_STOPPED: "stopped by a signal",
        psutil.STATUS_TRACING_STOP: "held by a debugger",
        psutil.STATUS_ZOMBIE: "ended",
        psutil.STATUS_DISK_SLEEP: "in an uninterruptible read or write",
    }
    return words.get(status)


def signalled_stack(note: dict[str, Any]) -> list[str]:
    """Asks a process on this host for its stack by signal; empty when it cannot be had."""
    if "stack_signal" not in note or process_state(note) is not None:
        return []
    path = f"/proc/{note['pid']}/fd/{note['stack_file']}"
    try:
        before = os.stat(path).st_size
        os.kill(note["pid"], note["stack_signal"])
        for _ in range(20):
            time.sleep(0.02)
            if os.stat(path).st_size > before:
                break
        with open(path) as file:
            file.seek(before)
            threads = re.split(r"^(?=\w.*hread 0x)", file.read(), flags=re.MULTILINE)
    except OSError as error:
        return [f"(no stack: {error.strerror})"]
    main = next((text for text in threads if note["stack_thread"] in text), "")
    return relevant(_lines(main))


def _lines(text: str) -> list[Line]:
    """The frames of one thread as `faulthandler` wrote them, outermost first.

    It does not tell which module is the script, so that is the body of a module which no other line of the user's leads to.
    """
    lines: list[Line] = []
    led_by_the_user = False
    for filename, number, function in reversed(re.findall(r'^\s*File "(.*)", line (\S+) in (.*)$', text, flags=re.MULTILINE)):
        users = is_of_the_user(filename)
        is_script = users and function == "<module>" and not led_by_the_user
        lines.append(Line(f'File "{filename}", line {number}, in {function}', filename, is_script))
        led_by_the_user = led_by_the_user or users
    return lines
