"""Messages for errors of the operating system: what happened to which file, and one sentence on what to do about it."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Final

from slipstream.errors import CheckpointError

__all__ = ["describe_os_error", "explain_os_errors", "suggest_remedy"]

_REMEDIES: Final[Mapping[int, str]] = {
    errno.ENOSPC: "The disk is full: remove something there, or choose another disk.",
    errno.EDQUOT: "The quota of this user is exhausted: remove something there, ask for more, or choose another folder.",
    errno.EFBIG: "The file is larger than this file system or `ulimit -f` allows: save in smaller shards (max_shard_size), or elsewhere.",
    errno.EIO: "The disk or the network behind it failed: look at the system's log (dmesg), and choose another disk.",
    errno.EROFS: "This file system is mounted read-only: choose another one, or mount it for writing.",
    errno.EACCES: "This user may not write there: change the permissions of the folder, or choose another folder.",
    errno.EPERM: "This user may not do that there: change the permissions of the folder, or choose another folder.",
    errno.ENOENT: "A parent folder was removed by another process, or cannot be created: choose another folder.",
    errno.ENOTDIR: "A part of the path is a file where a folder should be: remove it, or choose another folder.",
    errno.EEXIST: "Something of that name exists already: remove it, or choose another folder.",
    errno.ENOTEMPTY: "Another process writes into the same folder: give every run its own folder.",
    errno.EXDEV: "The folder is a mount point: use a folder below it.",
    errno.EBUSY: "The folder is in use by the system, perhaps as a mount point: use a folder below it.",
    errno.ENAMETOOLONG: "The name is longer than this file system allows: choose a shorter one.",
    errno.EMFILE: "This process has too many open files: raise `ulimit -n`, or close some.",
    errno.ENFILE: "The system has too many open files: close some.",
    errno.ELOOP: "There is a symbolic link where a file or folder should be: remove it, or choose another folder.",
    errno.ESTALE: "The server of this network file system has lost the folder: mount it again, or choose another folder.",
    errno.ENOMEM: "The system has no memory left for this: end something, or save in smaller shards (max_shard_size).",
}


def suggest_remedy(error: OSError, *, needed: int | None = None, free: int | None = None) -> str:
    """Return what to do about an error; for a full disk with the bytes that are needed and free, if known.

    >>> suggest_remedy(OSError(errno.ENOSPC, "No space left on device"), needed=5_000_000, free=1_000_000)
    'The disk is full: remove something there, or choose another disk. The file takes 5,000,000 bytes, and 1,000,000 are free.'
    """
    text = _REMEDIES.get(error.errno or 0, "Check whether that folder is writable, or choose another folder.")
    if error.errno == errno.ENOSPC and needed is not None and free is not None:
        text += f" The file takes {needed:,} bytes, and {free:,} are free."
    return text


def describe_os_error(error: OSError) -> str:
    """Return the reason of an error, with the file it happened to.

    >>> describe_os_error(FileNotFoundError(errno.ENOENT, "No such file or directory", "/data/model"))
    '/data/model: No such file or directory'
    """
    reason = error.strerror or str(error) or type(error).__name__
    if error.filename is None:
        return reason
    second = f" -> {_decode_name(error.filename2)}" if error.filename2 is not None else ""
    return f"{_decode_name(error.filename)}{second}: {reason}"


@contextmanager
def explain_os_errors(
    problem: str, *, after: str = "", separator: str = " ", needed: int | None = None, free: Callable[[], int | None] = lambda: None
) -> Iterator[None]:
    """Turn an `OSError` in the block into a `CheckpointError`: `problem`, the reason, the remedy, and `after`.

    `needed` and `free` (called only then) are bytes for the message of a full disk; `separator` stands before the remedy.

    >>> with explain_os_errors("The results cannot be kept"):
    ...     raise OSError(errno.EIO, "Input/output error")
    Traceback (most recent call last):
    slipstream.errors.CheckpointError: The results cannot be kept: Input/output error. The disk or the network behind it failed: ...
    """
    try:
        yield
    except CheckpointError:
        raise
    except OSError as error:
        remedy = suggest_remedy(error, needed=needed, free=free() if error.errno == errno.ENOSPC else None)
        raise CheckpointError(f"{problem}: {describe_os_error(error)}.{separator}{remedy}{after}") from error


def _decode_name(name: object) -> str:
    return name.decode(errors="replace") if isinstance(name, bytes) else str(name)
