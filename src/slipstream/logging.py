"""Loggers that know which process they run in: `get_logger(name)` instead of `logging.getLogger(name)`.

    logger = get_logger(__name__)
    logger.info("printed once, by the main process")
    logger.info("printed by every process", main_process_only=False)
    logger.info("printed by every process, rank 0 first", in_order=True)

A logger works before any state exists. Rank and world size come from the runtime if there is one, and from the variables of the launcher
if not; records carry the file and line of the caller. A message of every process begins with "[RANK n]".

Importing this module configures nothing, and the root logger is never touched. With `log_level` (the argument, else the option `log_level`,
also SLIPSTREAM_LOG_LEVEL) the level of this logger is set, and it gets a handler that prints to stderr as long as no other handler is
installed: Python would otherwise drop everything below WARNING.

With the option `log_format` "json" (also SLIPSTREAM_LOG_FORMAT) each record of these loggers is a line of JSON: the handler above prints
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
from slipstream.distributed.cluster import Process, loaded_runtime, this_process
from slipstream.errors import ConfigError
from slipstream.launch.output import NOTIFIED, JsonLineFormatter, effective_handlers, record_message, use_json_formatter, warning_listeners

if TYPE_CHECKING:
    _Adapter = logging.LoggerAdapter[logging.Logger]
else:
    _Adapter = logging.LoggerAdapter

__all__ = ["JsonFormatter", "MultiProcessAdapter", "get_logger"]


def get_logger(name: str, log_level: str | int | None = None) -> MultiProcessAdapter:
    """Return a logger whose messages come from the main process only, unless a call says otherwise.

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
        """Log on the processes that these keywords select; all other methods call this one."""
        if not self.isEnabledFor(level):
            return
        only_main = not in_order if main_process_only is None else main_process_only
        # Python internals: `stacklevel` counts frames, so each of our functions between the caller and the logger adds one. Python 3.10 to
        # 3.14; tests/test_logging.py notices when a record carries our line. It can go with LoggerAdapter.log doing this itself.
        kwargs["stacklevel"] = kwargs.get("stacklevel", 1) + 1
        runtime, process = loaded_runtime(), this_process()
        if only_main:
            if process.is_main:
                self._emit(level, msg, args, kwargs)
            return
        if process.world_size > 1:
            msg = f"[RANK {process.rank}] {msg}"
        if not in_order or process.world_size == 1 or (runtime is not None and runtime.child_of is not None):
            self._emit(level, msg, args, kwargs)  # a worker of a DataLoader does not take part in the order of the ranks
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
        listeners = warning_listeners() if level >= logging.WARNING else ()
        if listeners:
            keywords["extra"] = {**(keywords.get("extra") or {}), NOTIFIED: True}
        self.logger.log(level, msg, *args, **keywords)
        for listener in listeners:
            listener(self.logger.name, record_message(logging.LogRecord(self.logger.name, level, "", 0, msg, args, None)))

    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[Any, MutableMapping[str, Any]]:
        """Add this adapter's `extra` to that of the call, which takes precedence."""
        return msg, {**kwargs, "extra": {**(self.extra or {}), **(kwargs.get("extra") or {})}}

    def warning_once(self, msg: object, *args: object, **kwargs: Any) -> None:
        """Log a warning once, however often it is called with the same message.

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
    """Prints to stderr as long as the program has installed no handler of its own."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)  # not that of StreamHandler, which sets `stream`
        self.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))

    @property
    def stream(self) -> Any:
        """stderr as it is now: notebooks and tests replace it."""
        return sys.stderr

    def handle(self, record: logging.LogRecord) -> Any:
        """Emit only if no other handler on the way to the root would; of several like this one, only the nearest does."""
        handlers = list(effective_handlers(logging.getLogger(record.name)))
        nearest = next(iter(handlers), None)
        return nearest is self and all(isinstance(handler, _FallbackHandler) for handler in handlers) and super().handle(record)


def _rank_and_world() -> tuple[int, int]:
    process = this_process()
    return process.rank, process.world_size


def _configured() -> Safety:
    """Return the options about logging. A broken configuration is reported when a state is created, not by every logger."""
    try:
        return for_worker().safety
    except ConfigError:
        return Safety()


def _level(given: str | int) -> int:
    level = logging.getLevelName(given.strip().upper()) if isinstance(given, str) else given
    if isinstance(level, int) and not isinstance(level, bool):
        return level
    raise ConfigError(f"log_level={given!r} is not a level of the logging module. Write DEBUG, INFO, WARNING, ERROR or CRITICAL.")
