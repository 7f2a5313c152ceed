"""Loggers print where and when they are told, before and after a state exists, and say whose line it was."""

from __future__ import annotations

import inspect
import logging
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from slipstream.errors import ConfigError
from slipstream.logging import MultiProcessAdapter, get_logger

TWO = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


class Records(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.all: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.all.append(record)

    @property
    def messages(self) -> list[str]:
        return [record.getMessage() for record in self.all]


@pytest.fixture
def logger(request: pytest.FixtureRequest) -> MultiProcessAdapter:
    return get_logger(f"test.{request.node.name}", log_level="DEBUG")


@pytest.fixture
def records(logger: MultiProcessAdapter) -> Iterator[Records]:
    handler = Records()
    logger.logger.addHandler(handler)
    yield handler
    logger.logger.removeHandler(handler)


@pytest.fixture
def second_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in TWO.items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def first_rank(second_rank: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")


# Before any state


def test_a_single_process_prints_plainly(logger: MultiProcessAdapter, records: Records) -> None:
    logger.info("loss %.1f", 0.5)
    logger.info("all", main_process_only=False)
    logger.info("ordered", in_order=True)
    assert records.messages == ["loss 0.5", "all", "ordered"]


@pytest.mark.usefixtures("second_rank")
def test_other_ranks_silent_by_default(logger: MultiProcessAdapter, records: Records) -> None:
    """Another rank than the first is silent unless asked."""
    logger.error("only the main process")
    logger.info("all", main_process_only=False)
    assert records.messages == ["[RANK 1] all"]


@pytest.mark.usefixtures("first_rank")
def test_rank_prefix_on_all_rank_messages(logger: MultiProcessAdapter, records: Records) -> None:
    """The prefix is for messages of all ranks."""
    logger.info("main")
    logger.info("all %s", "of us", main_process_only=False)
    assert records.messages == ["main", "[RANK 0] all of us"]


@pytest.mark.usefixtures("first_rank")
def test_order_without_a_state_is_explained_once(logger: MultiProcessAdapter, records: Records) -> None:
    logger.info("a", in_order=True)
    logger.info("b", in_order=True)
    assert [message.split(":")[0] for message in records.messages] == ["[RANK 0] a", "in_order=True has no effect yet", "[RANK 0] b"]


@pytest.mark.usefixtures("second_rank")
def test_main_only_wins_over_in_order(logger: MultiProcessAdapter, records: Records) -> None:
    """Main process only and in order together wait for nobody."""
    logger.info("a", main_process_only=True, in_order=True)
    assert records.messages == []


@pytest.mark.parametrize(
    "broken", [{"RANK": "1"}, {"RANK": "x", "WORLD_SIZE": "2"}, {"SLIPSTREAM_LOG_LEVEL": "loud"}, {"SLIPSTREAM_LOG_FORMAT": "xml"}]
)
def test_broken_variables_lose_no_message(broken: dict[str, str], records: Records, monkeypatch: pytest.MonkeyPatch, logger: Any) -> None:
    for name, value in broken.items():
        monkeypatch.setenv(name, value)
    again = get_logger(logger.name)
    again.warning("still here")
    assert records.messages == ["still here"]


def test_logger_imports_no_torch() -> None:
    """A logger costs no torch and makes no state."""
    program = "import sys; from slipstream.logging import get_logger; get_logger('x').warning('hello'); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert (done.stdout, done.stderr) == ("False\n", "hello\n")


def log_in_a_child(queue: Any) -> None:
    """As in a worker of a DataLoader that has a state of its own: nobody can wait for it, so it does not wait for anybody."""
    from slipstream import PartialState

    assert PartialState().num_processes == 2
    handler = Records()
    logger = get_logger("test.child", "INFO")
    logger.logger.addHandler(handler)
    logger.info("ordered", in_order=True)
    queue.put(handler.messages)


def start_a_child() -> list[str]:
    import multiprocessing

    from slipstream import PartialState

    rank = PartialState().process_index
    if rank == 0:
        return []
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    child = context.Process(target=log_in_a_child, args=(queue,))
    child.start()
    said: list[str] = queue.get(timeout=60)
    child.join()
    return said


def test_child_process_logs_without_waiting(ranks: Any) -> None:
    """A child of a rank logs in order without waiting."""
    assert ranks(2).run(start_a_child) == [[], ["[RANK 1] ordered"]]


def test_a_logger_outlives_the_state(logger: MultiProcessAdapter, records: Records) -> None:
    from slipstream import PartialState
    from slipstream.distributed.current import reset

    PartialState()
    logger.info("with", in_order=True)
    reset()
    logger.info("without", in_order=True)
    assert records.messages == ["with", "without"]


# Where a record came from


def test_records_carry_caller_line(logger: MultiProcessAdapter, records: Records) -> None:
    """Records carry the callers file and line."""
    line = inspect.currentframe().f_lineno  # type: ignore[union-attr]
    logger.info("a")
    logger.log(logging.INFO, "b")
    logger.info("c", in_order=True)
    logger.warning_once("d")
    try:
        raise ValueError("cause")
    except ValueError:
        logger.exception("e")
    assert [(record.pathname, record.lineno - line) for record in records.all] == [(__file__, at) for at in (1, 2, 3, 4, 8)]
    assert records.all[-1].exc_info is not None


def test_a_wrapper_can_point_further_up(logger: MultiProcessAdapter, records: Records) -> None:
    def note(text: str) -> None:
        logger.info(text, stacklevel=2)

    note("a")
    assert records.all[0].funcName == "test_a_wrapper_can_point_further_up"


def test_extra_of_the_call_is_kept(logger: MultiProcessAdapter, records: Records) -> None:
    logger.info("a", extra={"step": 3})
    assert records.all[0].__dict__["step"] == 3


# Once


def test_a_warning_once(logger: MultiProcessAdapter, records: Records) -> None:
    for step in (1, 1, 2):
        logger.warning_once("slow")
        logger.warning_once("step %d", step)
        logger.warning_once("list %s", [step])
    assert records.messages == ["slow", "step 1", "list [1]", "step 2", "list [2]"]


# Levels and handlers


@contextmanager
def plain_root() -> Iterator[logging.Logger]:
    """The root without the handlers of pytest, as in a plain script."""
    root = logging.getLogger()
    handlers, root.handlers = root.handlers, []
    try:
        yield root
    finally:
        root.handlers = handlers


@pytest.mark.parametrize("level", ["INFO", "info", " Info ", logging.INFO])
def test_level_given_prints(level: Any, request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str]) -> None:
    """A level given prints from that level on."""
    logger = get_logger(request.node.name, level)
    with plain_root():
        logger.info("seen")
        logger.debug("not seen")
    assert [line.split(" ", 2)[2] for line in capsys.readouterr().err.splitlines()] == [f"INFO {request.node.name}: seen"]


def test_no_level_changes_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    """No level given leaves everything as python has it."""
    logger = get_logger("test.untouched")
    with plain_root():
        logger.info("not seen")
    assert (logger.logger.level, logger.logger.handlers, capsys.readouterr().err) == (logging.NOTSET, [], "")


def test_the_option_sets_the_level(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLIPSTREAM_LOG_LEVEL", "DEBUG")
    assert get_logger("test.option").isEnabledFor(logging.DEBUG)
    assert not get_logger("test.argument.wins", "ERROR").isEnabledFor(logging.WARNING)


def test_the_root_logger_is_not_touched() -> None:
    root = logging.getLogger()
    before = (root.level, list(root.handlers))
    get_logger("test.root", "DEBUG")
    assert (root.level, list(root.handlers)) == before


def test_nothing_printed_twice(capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing is printed twice by nested or repeated loggers."""
    get_logger("test.nested", "INFO")
    for _ in range(2):
        inner = get_logger("test.nested.inner", "INFO")
    with plain_root():
        inner.info("once")
    assert capsys.readouterr().err.count("once") == 1


def test_fallback_silent_with_other_handler(capsys: pytest.CaptureFixture[str]) -> None:
    """The fallback keeps silent once the program has a handler."""
    logger = get_logger("test.fallback", "INFO")
    handler = Records()
    with plain_root() as root:
        root.addHandler(handler)
        logger.info("for the program's handler")
    assert (handler.messages, capsys.readouterr().err) == (["for the program's handler"], "")


@pytest.mark.parametrize("level", ["loud", True, ""])
def test_a_level_that_is_none(level: Any) -> None:
    with pytest.raises(ConfigError, match="DEBUG, INFO, WARNING"):
        get_logger("test.wrong", level)


# With a state, on several ranks


def log_in_order() -> list[tuple[int, str]]:
    """Slower on the first ranks, so that only waiting puts the lines in order."""
    import time

    from slipstream import PartialState

    state = PartialState()
    seen: list[tuple[float, str]] = []

    class Clock(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            seen.append((time.monotonic(), record.getMessage()))

    logger = get_logger("test.ranks", "INFO")
    logger.logger.addHandler(Clock())
    for turn in range(3):
        time.sleep(0.02 * (state.num_processes - state.process_index))
        logger.info(f"turn {turn}", in_order=True)
    logger.info("main")
    both = state.gather([(state.process_index, text, at) for at, text in seen])
    by_time = sorted(both, key=lambda entry: entry[2])
    return [(rank, text) for rank, text, _ in by_time]


def test_ranks_print_one_after_the_other(ranks: Any) -> None:
    expected = [(rank, f"[RANK {rank}] turn {turn}") for turn in range(3) for rank in range(3)] + [(0, "main")]
    for seen in ranks(3).run(log_in_order):
        assert [tuple(entry) for entry in seen] == expected
