"""The exceptions of Slipstream, drawn as a tree.

    SlipstreamError
    ├── ConfigError (also ValueError)             an option, file or variable that cannot be used; the command line exits with 2
    ├── CheckpointError (also RuntimeError)       a checkpoint or file of weights that cannot be written, or cannot be trusted
    │   └── MissingCheckpointError (also FileNotFoundError)   there is none, or a file of it is not there
    ├── LaunchError                               processes could not be started, or one of them failed
    ├── StateError (also RuntimeError)            a call that does not fit the state of this process
    └── DistributedOperationException (also RuntimeError)
        ├── MismatchError                         the processes called different things; nothing was transferred
        ├── PeerLostError                         another process died, or left the job, while this one waited for it
        └── WaitTimeoutError                      the others did not come within the limit

Every message says what was given and where it came from, why it cannot work, and what to write instead. This module imports nothing, so
every other module may use it.
"""

from __future__ import annotations

__all__ = [
    "SlipstreamError", "ConfigError", "CheckpointError", "MissingCheckpointError", "LaunchError", "StateError",
    "DistributedOperationException", "MismatchError", "PeerLostError", "WaitTimeoutError",
]


class SlipstreamError(Exception):
    """Base of every exception that this library raises on purpose."""


class ConfigError(SlipstreamError, ValueError):
    """An option, a configuration file or a variable that cannot be used as given."""


class CheckpointError(SlipstreamError, RuntimeError):
    """A checkpoint or file of weights that cannot be written, or that cannot be trusted; the message names the file."""


class MissingCheckpointError(CheckpointError, FileNotFoundError):
    """There is no checkpoint where one was looked for, or a file of it is not there."""


class LaunchError(SlipstreamError):
    """Processes could not be started, or one of them failed; `exit_code` is what the command line returns."""

    def __init__(self, message: str, *, exit_code: int = 1) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class StateError(SlipstreamError, RuntimeError):
    """A call that does not fit the state of this process (made too early, too late, or in the wrong place)."""


class DistributedOperationException(SlipstreamError, RuntimeError):
    """Something between processes went wrong; the message names every rank, what it called and where."""


class MismatchError(DistributedOperationException):
    """The processes did not call the same thing with the same shapes and types; nothing was transferred."""


class PeerLostError(DistributedOperationException):
    """A process died or left the job while this one waited for it."""


class WaitTimeoutError(DistributedOperationException):
    """The other processes did not come within `timeout`; the message shows where each of them is."""
