"""A forked worker and a fresh interpreter run a target as `python` itself would; plain Python is the oracle."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

FORKED = """
import os, signal, sys
from slipstream.launch.plan import Target
from slipstream.launch.worker_main import ForkedWorker
from slipstream.launch.worker_processes import WorkerProcesses
kind, name, *arguments = sys.argv[1:]
workers = WorkerProcesses()
worker = ForkedWorker(target=Target(kind, name, tuple(arguments)), environment=dict(os.environ), stdout=None, stderr=None,
                      foreign=frozenset(), handlers={}, blocked=frozenset(), parent=os.getpid())
workers.fork(0, worker.run)
while workers.running:
    workers.wait(30)
    ends = workers.poll()
code = ends[0].exit_code
sys.exit(code) if code >= 0 else os.kill(os.getpid(), -code)
"""
WAYS = {"forked": [sys.executable, "-c", FORKED], "fresh": [sys.executable, "-m", "slipstream.launch.worker_main"]}
NASTY = ["--", "", "-c", "a b", "line\nbreak", "\udcff\udc80", "$HOME", "ä"]


@pytest.fixture(params=WAYS)
def way(request):
    return WAYS[request.param]


def run(command, folder: Path, **variables):
    environment = {**os.environ, "SLIPSTREAM_INTERNAL_ERROR_FILE": str(folder / "failure.json"), **variables}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, timeout=60)


def worker_error(folder: Path):
    return json.loads((folder / "failure.json").read_text())


def script(folder: Path, text: str, name: str = "train.py") -> str:
    (folder / name).write_text(text)
    return name


WHO = """
import sys, os, json
names = ("__name__", "__file__", "__package__", "__doc__", "__cached__")
spec = None if __spec__ is None else (__spec__.name, __spec__.origin)
import __main__
print(json.dumps([sys.argv, sys.path[0], {name: globals()[name] for name in names}, spec, type(__loader__).__name__,
                  __main__ is sys.modules["__main__"], vars(__main__) is globals(), sys.stdin.read(), os.getcwd()]))
"""


@pytest.mark.parametrize("place", ["train.py", "sub/train.py", "link.py"])
def test_script_identity(way, place, tmp_path):
    """A script finds itself as under Python."""
    (tmp_path / "sub").mkdir()
    script(tmp_path, WHO)
    script(tmp_path, WHO, "sub/train.py")
    (tmp_path / "link.py").symlink_to("sub/train.py")
    expected = run([sys.executable, place, *NASTY], tmp_path)
    assert expected.returncode == 0
    assert run([*way, "script", place, *NASTY], tmp_path).stdout == expected.stdout


@pytest.mark.parametrize("name", ["train", "package", "package.inner"])
def test_module_identity(way, name, tmp_path):
    """A module finds itself as under Python."""
    (tmp_path / "package").mkdir()
    for place in ("train.py", "package/__init__.py", "package/__main__.py", "package/inner.py"):
        script(tmp_path, WHO if "__init__" not in place else "", place)
    expected = run([sys.executable, "-m", name, *NASTY], tmp_path)
    assert expected.returncode == 0
    assert run([*way, "module", name, *NASTY], tmp_path).stdout == expected.stdout


ENDS = {
    "return": "pass",
    "none": "import sys; sys.exit()",
    "zero": "import sys; sys.exit(0)",
    "code": "import sys; sys.exit(7)",
    "large": "import sys; sys.exit(256 + 3)",
    "huge": "import sys; sys.exit(10**30)",
    "boolean": "import sys; sys.exit(True)",
    "exception": "raise ValueError('boom')",
    "syntax": "def",
    "at once": "import os; os._exit(9)",
    "killed": "import os; os.kill(os.getpid(), 9)",
    "thread": "import threading, time; threading.Thread(target=lambda: (time.sleep(0.2), print('thread'))).start()",
    "exit handler": "import atexit; atexit.register(print, 'handler'); print('body'); 1 / 0",
    "file": "open('out', 'w').write('kept'); file = open('out2', 'w'); file.write('kept too')",
    "finaliser": "class A:\n    def __del__(self): print('finalised')\na = A()",
    "finaliser of a module": "with open('lib.py', 'w') as f: f.write('class A:\\n  def __del__(self): print(1)\\na = A()')\nimport lib",
    "excepthook exits": "import sys\nsys.excepthook = lambda *error: sys.exit(7)\n1 / 0",
    "text of C": "import ctypes; ctypes.CDLL(None).printf(b'no end of line')",
    "blocked thread": """
import os, threading, time
reader, writer = os.pipe()
threading.Thread(target=open(writer, 'wb').write, args=(bytes(10**6),), daemon=True).start()
time.sleep(0.3)
file = open('out', 'w')
file.write('kept')""",
    "thread and handler": "import threading, atexit; atexit.register(print, 'handler'); threading.Timer(0.1, print, ['timer']).start()",
}


@pytest.mark.parametrize("text", ENDS.values(), ids=ENDS.keys())
def test_exit_like_python(way, text, tmp_path):
    """An end is the end that Python gives."""
    script(tmp_path, text)
    expected = run([sys.executable, "train.py"], tmp_path, PYTHONUNBUFFERED="")
    files = {path.name: path.read_text() for path in tmp_path.glob("out*")}
    found = run([*way, "script", "train.py"], tmp_path, PYTHONUNBUFFERED="")
    assert (found.returncode, found.stdout) == (expected.returncode, expected.stdout)
    assert {path.name: path.read_text() for path in tmp_path.glob("out*")} == files


@pytest.mark.parametrize(
    "text",
    [
        "def f():\n    raise ValueError('boom')\nf()",
        "try:\n    {}['x']\nexcept KeyError as error:\n    raise RuntimeError('because') from error",
        "def",
        "import json; json.loads('{')",
        "class Odd(Exception): pass\nraise Odd()",
        "class Mute(ValueError):\n    def __str__(self): raise ValueError\nraise Mute",
    ],
)
def test_exception_recorded_not_printed(way, text, tmp_path):
    """An exception is recorded as Python prints it and not printed."""
    script(tmp_path, text)
    expected = run([sys.executable, "train.py"], tmp_path).stderr.decode()
    expected = expected.replace("__main__.", "")  # Python 3.10 alone prints the module
    found = run([*way, "script", "train.py"], tmp_path)
    assert found.stderr == b""
    assert worker_error(tmp_path)["traceback"] == expected


def test_exception_printed_without_error_file(way, tmp_path):
    """An exception is printed where it cannot be recorded."""
    script(tmp_path, "raise ValueError('boom')")
    found = run([*way, "script", "train.py"], tmp_path, SLIPSTREAM_INTERNAL_ERROR_FILE=str(tmp_path / "no" / "such"))
    assert b"ValueError: boom" in found.stderr


def test_user_excepthook_called(way, tmp_path):
    """An excepthook of the user is called."""
    script(tmp_path, "import sys\nsys.excepthook = lambda kind, error, traceback: print('hook', kind.__name__)\nraise ValueError('boom')")
    assert run([*way, "script", "train.py"], tmp_path).stdout == b"hook ValueError\n"


@pytest.mark.parametrize(
    ("text", "kind", "code"),
    [
        ("from slipstream.errors import ConfigError; raise ConfigError('write x')", "config", 2),
        ("from slipstream.errors import PeerLostError; raise PeerLostError('rank 1')", "peer", 1),
        ("raise KeyboardInterrupt", "interrupt", 130),
        ("import sys; sys.exit('a message')", "exit", 1),
        ("import sys\nclass A:\n    def __str__(self): raise ValueError\nsys.exit(A())", "exit", 1),
        ("import sys\nclass A:\n    def __ne__(self, other): raise ValueError\nsys.exit(A())", "exit", 1),
        ("import sys\nsys.excepthook = lambda *error: 1 / 0\nraise ValueError", "exception", 1),
    ],
)
def test_error_kinds(way, text, kind, code, tmp_path):
    """Kinds of ends are told apart."""
    script(tmp_path, text)
    assert run([*way, "script", "train.py"], tmp_path).returncode == code
    assert worker_error(tmp_path)["kind"] == kind
    if kind == "peer":
        assert worker_error(tmp_path)["traceback"] == ""


def test_internal_variables_removed(way, tmp_path):
    """Our own variables do not reach the script."""
    script(tmp_path, "import os; print([name for name in os.environ if name.startswith('SLIPSTREAM_INTERNAL')])")
    assert run([*way, "script", "train.py"], tmp_path).stdout == b"[]\n"


def test_crash_writes_stack(way, tmp_path):
    """A crash leaves the stack of the moment."""
    script(tmp_path, "import os, signal\ndef f():\n    os.kill(os.getpid(), signal.SIGSEGV)\nf()")
    stack = tmp_path / "stack.txt"
    assert run([*way, "script", "train.py"], tmp_path, SLIPSTREAM_INTERNAL_STACK_FILE=str(stack)).returncode == -signal.SIGSEGV
    assert 'train.py", line 3 in f' in stack.read_text()


def test_lines_arrive_at_once(way, tmp_path):
    """Lines arrive at once."""
    script(tmp_path, "import os; print('a line'); os._exit(0)")
    assert run([*way, "script", "train.py"], tmp_path).stdout == b"a line\n"


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_lines_arrive_whole(way, tmp_path, unbuffered):
    """A line and its end in one write, or lines of two ranks would be mixed."""
    script(tmp_path, "import os; print('a', 'line'); print('half', end=''); os._exit(0)")
    found = run([*way, "script", "train.py"], tmp_path, PYTHONUNBUFFERED=unbuffered)
    assert found.stdout == b"a line\n"


def test_forked_random_states_differ(tmp_path):
    """Forked workers do not share random states."""
    draw = script(tmp_path, "import random, sys; print(random.random(), sys.modules['numpy'].random.random())")
    program = f"import numpy as np, numpy.random, random; random.seed(1); np.random.seed(1)\n{FORKED}"
    drawn = [run([sys.executable, "-c", program, "script", draw], tmp_path).stdout.split() for _ in range(2)]
    assert len({number for pair in drawn for number in pair}) == 4


def test_missing_module_is_config_error(way, tmp_path):
    """A module that is missing is a configuration error and one that it misses is not."""
    assert run([*way, "module", "no_such_module_here"], tmp_path).returncode == 2
    script(tmp_path, "import no_such_module_either")
    assert run([*way, "module", "train"], tmp_path).returncode == 1
    assert worker_error(tmp_path)["type"] == "ModuleNotFoundError"
