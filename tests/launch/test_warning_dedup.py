"""What several processes say alike: who is heard, what is never dropped, and what the terminal leaves out of a file."""

from __future__ import annotations

import io
import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from slipstream.config import resolve
from slipstream.launch.output import LogFolder, Tee, as_json_line
from slipstream.launch.plan import MachineSpec, Target, make_plan
from slipstream.launch.warning_dedup import WarningDedup, WorkerOutput

LIBRARY = "/usr/lib/python3/site-packages/loud/core.py"


@pytest.fixture
def three(tmp_path: Path) -> list[WarningDedup]:
    return [WarningDedup(WorkerOutput(claims=str(tmp_path)), rank, 3, {}) for rank in range(3)]


def test_first_claim_prints_repeatedly(three):
    """The first process to claim a warning prints it, also when it repeats it."""
    assert [three[rank].is_first("a") for rank in (1, 0, 2, 1, 0)] == [True, False, False, True, False]
    assert three[0].is_first("b")


def test_without_folder_all_print(three, tmp_path):
    """Without a folder for claims every process prints."""
    for dedup in (WarningDedup(WorkerOutput(claims=str(tmp_path / "gone")), 1, 2, {}), WarningDedup(WorkerOutput(), 1, 2, {})):
        three[0].is_first("a")
        assert dedup.is_first("a")


def test_many_different_warnings_all_print(three, monkeypatch):
    """A process with very many different warnings prints all of them."""
    monkeypatch.setattr("slipstream.launch.warning_dedup._MAX_CLAIMS", 2)
    for text in "abc":
        three[0].is_first(text)
    assert [three[1].is_first(text) for text in "abc"] == [False, False, True]


def logged(path: str = LIBRARY, level: int = logging.WARNING, text: object = "careful %d", args: tuple[object, ...] = (1,), error=None):
    return logging.LogRecord("loud", level, path, 3, text, args, (type(error), error, None) if error else None)


def heard(dedup: WarningDedup, record: logging.LogRecord) -> str | None:
    handler = logging.StreamHandler(io.StringIO())
    return record.getMessage() if dedup.is_printed(record, handler) else None


def test_library_warning_printed_once(three):
    """A warning of a library is printed once, with its rank."""
    assert [heard(three[rank], logged()) for rank in (2, 0, 1)] == ["[RANK 2] careful 1", None, None]
    assert [heard(three[rank], logged(args=(rank,))) for rank in (2, 0)] == ["[RANK 2] careful 2", "careful 0"]


@pytest.mark.parametrize(
    "record",
    [
        lambda: logged(level=logging.ERROR),
        lambda: logged(level=logging.INFO),
        lambda: logged("/home/me/train.py"),
        lambda: logged(error=ValueError("x")),
        lambda: logged(text="[RANK 1] careful %d"),
    ],
    ids=["an error", "information", "the user's own code", "with a traceback", "of every process on purpose"],
)
def test_never_dropped(three, record):
    """What is never dropped."""
    assert [heard(dedup, record()) for dedup in three] == [record().getMessage()] * 3


def test_record_with_wrong_arguments(three):
    """A record whose arguments do not fit does no harm."""
    assert three[0].is_printed(logged(args=("x", "y")), logging.StreamHandler(io.StringIO()))


SHOW = """
import sys, warnings
from slipstream.launch.warning_dedup import WarningDedup, WorkerOutput
warnings.filterwarnings(*sys.argv[2:]) if sys.argv[2:] else None
for rank in range(2):
    WarningDedup(WorkerOutput(claims=sys.argv[1]), rank, 2, {}).install()
    warnings.warn_explicit("careful", UserWarning, "lib.py", 3)
    warnings.showwarning = warnings._showwarning_orig
"""


@pytest.mark.parametrize(
    ("flags", "filters", "count"),
    [
        ([], [], 1),
        (["-W", "always"], [], 2),
        (["-W", "error::ResourceWarning"], [], 2),
        ([], ["always", "care"], 2),
        ([], ["always", "x"], 1),
    ],
)
def test_user_wants_all_warnings(tmp_path, flags, filters, count):
    """Warnings are left alone if the user wants all of them."""
    done = subprocess.run(
        [sys.executable, *flags, "-c", SHOW, str(tmp_path), *filters], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stderr.count("lib.py:3: UserWarning: careful") == count, done.stderr


HEARD = """
import logging, sys, warnings
from slipstream.launch.warning_dedup import WorkerOutput, install_warning_dedup
from slipstream.logging import get_logger
from slipstream.distributed.current import current
install_warning_dedup(WorkerOutput(json=True).dump(), {})
told = []
current().warning_listeners.append(lambda logger, text: told.append((logger, text)))
warnings.warn_explicit("careful", UserWarning, "lib.py", 3)
logging.getLogger("other").addHandler(logging.StreamHandler())
logging.getLogger("other").warning("lost %d", 1)
logging.getLogger("other").addHandler(logging.StreamHandler())
logging.getLogger("other").warning("twice")  # meets two handlers that print
logging.getLogger("other").info("not shown")
get_logger("ours").warning("bad %d", "x")
print(told)
"""


def test_printed_warnings_notified_once():
    """Warnings that are shown are reported once."""
    done = subprocess.run([sys.executable, "-c", HEARD], capture_output=True, text=True, timeout=60, check=True)
    told = [("py.warnings", "UserWarning: careful"), ("other", "lost 1"), ("other", "twice")]
    assert done.stdout.startswith(repr(told)[:-1] + ", ('ours', \"bad %d ('x',) (these do not fit"), done.stdout + done.stderr


ENDS = """
import sys, threading, warnings
from slipstream.launch.warning_dedup import WorkerOutput, install_warning_dedup
install_warning_dedup(WorkerOutput(json=True).dump(), {})
class Bad:
    def __del__(self):
        raise ValueError("deleted")
sys.stderr.write("\\r 50%")
warnings.warn("careful")
print("waiting ...", end="", file=sys.stderr)
thread = threading.Thread(target=lambda: 1 / 0, name="mine")
thread.start()
thread.join()
Bad()
sys.stderr.write("\\r 99%")
"""


def test_python_messages_as_json():
    """What Python prints is JSON on lines of its own."""
    done = subprocess.run([sys.executable, "-c", ENDS], capture_output=True, text=True, timeout=60, check=True)
    lines = done.stderr.split("\n")
    found = [json.loads(line) for line in lines if line.startswith("{")]
    assert [line.strip() for line in lines if line and not line.startswith("{")] == ["50%", "waiting ...", "99%"]
    begins = ("UserWarning: ", "Exception in thread mine", "Exception ignored ")  # "in", or "while calling deallocator" (Python 3.14)
    assert all(entry["message"].startswith(begin) for entry, begin in zip(found, begins, strict=True)), found
    assert ["exception" in entry and entry["exception"].splitlines()[-1] for entry in found] == [
        False,
        "ZeroDivisionError: division by zero",
        "ValueError: deleted",
    ]


# What the terminal leaves out


@given(st.lists(st.tuples(st.booleans(), st.lists(st.sampled_from(["a", "b", ""]), min_size=1, max_size=3), st.booleans()), max_size=8))
def test_hidden_lines_not_on_terminal(tmp_path_factory, texts):
    """Hidden texts are in the file and not on the terminal."""
    folder = tmp_path_factory.mktemp("hidden")
    source, hidden, terminal = folder / "source", folder / "hidden.2", folder / "terminal"
    source.touch()
    tee = Tee()
    destination = os.open(terminal, os.O_WRONLY | os.O_CREAT)
    tee.follow(source, "", destination, hidden=hidden)
    dedup = WarningDedup(WorkerOutput(files=2, hidden=str(folder / "hidden")), 1, 2, {})
    stream = open(source, "a", buffering=1, encoding="utf-8")  # noqa: SIM115
    expected = []
    for number, (dropped, lines, pump) in enumerate(texts):
        text = "".join(f"{number} {line}\n" for line in lines)
        if dropped:
            assert dedup._hide_from_terminal(text, stream)
        else:
            expected.append(text)
        stream.write(text[:1])  # seen in the middle of a line
        stream.flush()
        if pump:
            tee.pump()
        stream.write(text[1:])
    tee.pump()
    tee.finish()
    stream.close()
    os.close(destination)
    assert terminal.read_text() == "".join(expected)
    assert len(source.read_text().splitlines()) == sum(len(lines) for _, lines, _ in texts)


def test_json_lines_without_prefix(tmp_path, capfd):
    """Lines of JSON get no prefix."""
    (tmp_path / "log").write_text('{"rank": 1}\nplain\n')
    for json_lines in (True, False):
        tee = Tee()
        tee.follow(tmp_path / "log", "[default1]:", 1, json_lines=json_lines)
        tee.pump()
        tee.finish()
    assert capfd.readouterr().out.splitlines() == ['{"rank": 1}', "[default1]:plain", '[default1]:{"rank": 1}', "[default1]:plain"]


# Files


@pytest.mark.parametrize(
    ("log_dir", "tee", "direct", "files", "shown", "not_shown"),
    [
        (True, {0: 3, 1: 3}, (), [3, 3], [True, True], []),
        (True, {0: 3, 1: 0}, (), [3, 3], [True, False], [1]),
        (True, {0: 1, 1: 1}, (), [3, 3], [False, False], [0, 1]),
        (True, {0: 0, 1: 3}, (0,), [0, 3], [True, True], []),
        (False, {0: 3, 1: 0}, (), [3, 0], [True, True], []),
    ],
)
def test_files_by_rank_and_tee(tmp_path, log_dir, tee, direct, files, shown, not_shown):
    """With a folder every rank has files and without one nothing is lost."""
    folder = LogFolder(str(tmp_path) if log_dir else None, "run", tee, direct)
    files_of = [folder.worker_files(0, 10 + local, local) for local in range(2)]
    assert [worker.files for worker in files_of] == files
    assert [worker.is_shown for worker in files_of] == shown
    assert folder.not_shown() == not_shown
    assert [worker.log is not None for worker in files_of] == [log_dir and file > 0 for file in files]
    (files_of[0].claims / "something").touch()
    folder.remove()
    assert not files_of[0].claims.exists()
    assert folder.path.exists() == log_dir


def test_json_needs_launcher():
    """JSON of one process needs the launcher."""
    methods = {}
    for form in ("text", "json"):
        config = resolve(flags={"cpu": True, "log_format": form}, environ={})
        methods[form] = make_plan(config, Target("module", "timeit"), {}, MachineSpec(platform="linux")).start_method
    assert methods == {"text": "exec", "json": "fork"}


def test_launcher_traceback_in_record():
    """A traceback of the launcher is the exception of its record."""
    found = json.loads(as_json_line("slipstream: rank 1 failed", logging.ERROR, 1, 2, "Traceback\nValueError: bad"))
    assert (found["rank"], found["world"], found["level"], found["file"]) == (1, 2, "ERROR", None)
    assert (found["message"], found["exception"]) == ("rank 1 failed", "Traceback\nValueError: bad")
    assert "exception" not in json.loads(as_json_line("a note", logging.INFO, None, 2))
