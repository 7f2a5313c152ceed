"""Loggers that know which process they run in: `get_logger(name)` instead of `logging.getLogger(name)`.

    logger = get_logger(__name__)
    logger.info("printed once, by the main process")
    logger.info("printed by every process", main_process_only=False)
    logger.info("printed by every process, rank 0 first", in_order=True)

What this promises: a logger works before any state exists, and never raises because of where it is. Who this process is comes from
the runtime if there is one, and from the variables of the launcher if not. Records carry the file and line of the caller.
A message of every process begins with "[RANK n]"; one of the main process alone does not.

What it never does: make a state, open a process group for a process that has no state, configure anything at import, or touch the
root logger. Levels: with `log_level` (the argument, else the option `log_level`, also SLIPSTREAM_LOG_LEVEL) the level of this one
logger is set. Python would still drop everything below WARNING as long as no handler is installed anywhere, so such a logger also
gets a handler that prints to stderr, but only while there is no other: after `logging.basicConfig` or the like it keeps silent,
and nothing is printed twice.

With the option `log_format` "json" (also SLIPSTREAM_LOG_FORMAT) each record of these loggers is one line of JSON: the handler above prints
it, and so do handlers of the program that would print plain text to the terminal. `JsonFormatter` is the same for handlers of your own.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import MutableMapping
from typing import TYPE_CHECKING, Any

from slipstream.config import for_worker
from slipstream.config.schema import Safety
from slipstream.config.sources import environment
from slipstream.distributed.cluster import Process, detect
from slipstream.errors import ConfigError
from slipstream.launch.output import NOTIFIED, JsonLineFormatter, effective_handlers, record_message, use_json_formatter, warning_listeners

if TYPE_CHECKING:
    from slipstream.distributed.process_group import Runtime

    _Adapter = logging.LoggerAdapter[logging.Logger]
else:
    _Adapter = logging.LoggerAdapter

__all__ = ["JsonFormatter", "MultiProcessAdapter", "get_logger"]


def get_logger(name: str, log_level: str | int | None = None) -> MultiProcessAdapter:
    """A logger whose messages come from the main process only, unless a call says otherwise.

    >>> logger = get_logger("doctest.example", log_level="INFO")
    >>> logger.isEnabledFor(logging.INFO), logger.isEnabledFor(logging.DEBUG)
    (True, False)
    """
    options = _configured()
    given = log_level if log_level is not None else options.log_level
    logger = logging.getLogger(name)
    formatter = JsonFormatter() if options.log_format == "json" else None
    if given is not None:
        logger.setLevel(_level(given))
    if (given is not None or formatter) and not any(isinstance(handler, _FallbackHandler) for handler in logger.handlers):
        logger.addHandler(_FallbackHandler())
    if formatter is not None:
        use_json_formatter(effective_handlers(logger), formatter)
    adapter = MultiProcessAdapter(logger, {})
    adapter.formatter = formatter
    return adapter


class JsonFormatter(JsonLineFormatter):
    """A formatter for handlers of your own: each record becomes one line of JSON, with the rank of the process, and without secrets.

    Keys: time (UTC), level, logger, rank, world, host, message, file ("train.py:7"); and exception, stack and extra where there are any.

    >>> import io, json
    >>> handler = logging.StreamHandler(io.StringIO())
    >>> handler.setFormatter(JsonFormatter())
    >>> logger = logging.getLogger("doctest.json")
    >>> logger.addHandler(handler)
    >>> logger.warning("loss %.1f", 0.5, extra={"step": 3})
    >>> found = json.loads(handler.stream.getvalue())
    >>> found["level"], found["rank"], found["message"], found["extra"]
    ('WARNING', 0, 'loss 0.5', {'step': 3})
    """

    def __init__(self, fmt: None = None, datefmt: None = None, style: str = "%") -> None:
        if fmt is not None or datefmt is not None:
            raise ConfigError(f"JsonFormatter was given the format {fmt or datefmt!r}, but its lines have one form. Give it none.")
        super().__init__(_rank_and_world, environment())


class MultiProcessAdapter(_Adapter):
    """A `logging.LoggerAdapter` with two more keywords on every call; made by `get_logger`.

    `main_process_only` (default True): only rank 0 prints. `in_order` (default False): every process prints, one after the other;
    all of them have to make the call, as it waits. Given both, `main_process_only=True` wins and nothing waits.
    """

    def __init__(self, logger: logging.Logger, extra: dict[str, object] | None = None) -> None:
        super().__init__(logger, extra or {})
        self.formatter: logging.Formatter | None = None
        """For handlers that would print plain text to the terminal; None leaves them alone."""
        self._said: set[str] = set()

    def log(  # type: ignore[override]  # the two keywords more
        self,
        level: int,
        msg: object,
        *args: object,
        main_process_only: bool | None = None,
        in_order: bool = False,
        **kwargs: Any,
    ) -> None:
        """Log where and when these keywords say; all the other methods end here."""
        if not self.isEnabledFor(level):
            return
        only_main = not in_order if main_process_only is None else main_process_only
        kwargs["stacklevel"] = kwargs.get("stacklevel", 1) + 1
        runtime = _runtime()
        process = runtime.process if runtime is not None else _process_by_variables()
        if only_main:
            if process.is_main:
                self._emit(level, msg, args, kwargs)
            return
        if process.world_size > 1:
            msg = f"[RANK {process.rank}] {msg}"
        if not in_order or process.world_size == 1 or (runtime is not None and runtime.child_of is not None):
            self._emit(level, msg, args, kwargs)  # a worker of a DataLoader has no place in the order of the ranks
        elif runtime is None:
            self._emit(level, msg, args, kwargs)
            self._explain_no_order(process)
        else:
            for turn in range(process.world_size):
                if turn == process.rank:
                    self._emit(level, msg, args, kwargs)
                runtime.wait_for_everyone()

    def _emit(self, level: int, msg: object, args: tuple[object, ...], kwargs: dict[str, Any]) -> None:
        if self.formatter is not None:  # the program may have installed handlers since the last time
            use_json_formatter(effective_handlers(self.logger), self.formatter)
        msg, keywords = self.process(msg, {**kwargs, "stacklevel": kwargs["stacklevel"] + 1})
        told = warning_listeners() if level >= logging.WARNING else ()
        if told:
            keywords["extra"] = {**(keywords.get("extra") or {}), NOTIFIED: True}
        self.logger.log(level, msg, *args, **keywords)
        for hear in told:
            hear(self.logger.name, record_message(logging.LogRecord(self.logger.name, level, "", 0, msg, args, None)))

    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[Any, MutableMapping[str, Any]]:
        """Adds this adapter's `extra` to that of the call, which wins."""
        return msg, {**kwargs, "extra": {**(self.extra or {}), **(kwargs.get("extra") or {})}}

    def warning_once(self, msg: object, *args: object, **kwargs: Any) -> None:
        """A warning that this logger gives once, however often it is called with the same message.

        >>> logger = get_logger("doctest.once")
        >>> logger.logger.addHandler(logging.StreamHandler(sys.stdout))
        >>> for _ in range(3):
        ...     logger.warning_once("this is slow")
        this is slow
        """
        key = repr((msg, args))
        if key not in self._said:
            self._said.add(key)
            self.log(logging.WARNING, msg, *args, **{**kwargs, "stacklevel": kwargs.get("stacklevel", 1) + 1})

    def _explain_no_order(self, process: Process) -> None:
        key = "in_order without a state"
        if process.is_main and key not in self._said:
            self._said.add(key)
            self.logger.warning(
                "in_order=True has no effect yet: the processes cannot wait for each other before a PartialState or Accelerator "
                "is made. Make one first, or leave in_order out."
            )


class _FallbackHandler(logging.StreamHandler):  # type: ignore[type-arg]
    """Prints to stderr what no other handler would: it stands in while a program has installed none."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)  # not that of StreamHandler, which sets `stream`
        self.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))

    @property
    def stream(self) -> Any:
        """stderr as it is now: notebooks and tests replace it."""
        return sys.stderr

    def handle(self, record: logging.LogRecord) -> Any:
        """Only if nobody else on the way to the root would, and, of several like this one, only the nearest."""
        handlers = list(effective_handlers(logging.getLogger(record.name)))
        nearest = next(iter(handlers), None)
        return nearest is self and all(isinstance(handler, _FallbackHandler) for handler in handlers) and super().handle(record)


def _runtime() -> Runtime | None:
    """The runtime, if there is one. Where its module is not loaded there is none, and loading it would import torch."""
    module = sys.modules.get("slipstream.distributed.current")
    current_or_none = getattr(module, "current_or_none", None)  # absent while the module itself is being loaded
    runtime: Runtime | None = current_or_none() if current_or_none is not None else None
    return runtime


def _process_by_variables() -> Process:
    """Who this process is by the variables of the launcher. Broken ones are the state's to report; a message is not lost over them."""
    try:
        return detect(environment())
    except ConfigError:
        return Process()


def _rank_and_world() -> tuple[int, int]:
    runtime = _runtime()
    process = runtime.process if runtime is not None else _process_by_variables()
    return process.rank, process.world_size


def _configured() -> Safety:
    """The options about logging. A broken configuration is reported when a state is made, not by every logger."""
    try:
        return for_worker().safety
    except ConfigError:
        return Safety()


def _level(given: str | int) -> int:
    level = logging.getLevelName(given.strip().upper()) if isinstance(given, str) else given
    if isinstance(level, int) and not isinstance(level, bool):
        return level
    raise ConfigError(f"log_level={given!r} is not a level of the logging module. Write DEBUG, INFO, WARNING, ERROR or CRITICAL.")
