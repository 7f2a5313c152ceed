"""The habits of this project, held by tests: sizes, layers, cycles, variables, torch-free rooms, exports, devices, state.

The checks are functions in `shape_checks.py`. Here they meet the tree; and each meets a bad example, so that none can pass by not looking.
"""

from __future__ import annotations

import importlib
import pkgutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import shape_checks as checks
from slipstream.config import OPTIONS
from slipstream.config.roundtrip import TRAVELLERS, samples, travel

SOURCE = Path(__file__).parent.parent / "src" / "slipstream"
SOURCES = {path.relative_to(SOURCE).as_posix(): path.read_text() for path in sorted(SOURCE.rglob("*.py"))}


@pytest.fixture(scope="module", autouse=True)
def _forget_the_trees() -> Iterator[None]:
    """They are parsed once for all checks, and would be walked by every garbage collection that comes later."""
    yield
    checks.tree_of.cache_clear()
    checks.nodes_of.cache_clear()


def complaints(check: checks.Check) -> list[str]:
    return [f"{path}: {complaint}" for path, text in SOURCES.items() for complaint in check(path, text)]


@pytest.mark.parametrize("check", checks.CHECKS, ids=lambda check: check.__name__)
def test_the_tree_keeps(check):
    assert complaints(check) == []


def test_no_import_cycles():
    assert checks.cycles(SOURCES) == []


LAZY = "if TYPE_CHECKING:\n    from slipstream.comm.ops import a\ndef __getattr__(name): ...\n"
BAD = [
    (checks.file_length, "comm/ops.py", "x = 1\n" * 701, "701 lines"),
    (checks.function_length, "comm/ops.py", "def long():\n" + "    x = 1\n" * 60, "long has 61 lines"),
    (checks.layers, "comm/ops.py", "from slipstream.runtime.state import PartialState", "comm (layer 3) imports runtime (layer 4)"),
    (checks.layers, "devices/table.py", "def f():\n    import slipstream.launch.plan", "devices (layer 2) imports launch (layer 2)"),
    (checks.layers, "config/a.py", "from ..utils import x", "config (layer 1) imports utils"),
    (checks.layers, "config/a.py", "from slipstream import PartialState", "imports PartialState, whose room has no layer"),
    (checks.layers, "novelty/a.py", "", "the room novelty has no layer"),
    (checks.variables, "launch/plan.py", "import os\nos.environ['X'] = '1'", "os.environ"),
    (checks.variables, "launch/plan.py", "import os\nos.getenv('X')", "os.getenv"),
    (checks.variables, "launch/plan.py", "from os import environ", "from os import environ"),
    (checks.torch_at_import, "launch/plan.py", "try:\n    import torch.distributed\nexcept ImportError:\n    pass", "imports torch"),
    (checks.torch_at_import, "cli/env.py", "class A:\n    from torch import nn", "imports torch"),
    (checks.exports, "comm/ops.py", "def gather(): ...", "has no __all__, but defines gather"),
    (checks.exports, "comm/ops.py", "__all__ = ['a']\ndef a(): ...\ndef b(): ...", "visible but not in __all__: b"),
    (checks.exports, "comm/ops.py", "__all__ = ['a', 'b']\ndef a(): ...", "in __all__ but neither defined nor imported here: b"),
    (checks.exports, "comm/ops.py", "__all__ = ['a', 'a']\ndef a(): ...", "repeats a"),
    (checks.exports, "comm/__init__.py", "from slipstream.comm.ops import a, b\n__all__ = ['a']", "visible but not in __all__: b"),
    (checks.exports, "utils.py", f"{LAZY}__all__ = ['a', 'b']", "in __all__ but neither defined nor imported here: b"),
    (checks.exports, "utils.py", f"{LAZY}__all__ = []", "shown to type checkers but not in __all__: a"),
    (checks.device_names, "comm/ops.py", "x.is_cuda", "names the device family cuda"),
    (checks.device_names, "launch/plan.py", "name = f'{x}CUDA_VISIBLE_DEVICES'", "names the device family cuda"),
    (checks.device_names, "comm/ops.py", "def to_mps(npu=None): ...", "names the device family npu"),
    (checks.device_names, "comm/ops.py", "import torch_xla as x", "names the device family xla"),
    (checks.mutable_state, "comm/ops.py", "cache = {}", "cache is state"),
    (checks.mutable_state, "comm/ops.py", "_seen: set[int] = set()", "_seen is state"),
    (checks.mutable_state, "comm/ops.py", "import threading\nx = threading.local()", "x is state"),
    (checks.mutable_state, "comm/ops.py", "class Borg:\n    _shared = {}", "_shared is state"),
    (checks.mutable_state, "comm/ops.py", "def f():\n    global count\n    count = 1", "global count"),
    (checks.silent_except, "comm/ops.py", "try:\n    f()\nexcept Exception:\n    pass", "hides the error"),
    (checks.silent_except, "comm/ops.py", "try:\n    f()\nexcept (ValueError, BaseException):\n    'no matter'", "hides the error"),
    (checks.silent_except, "comm/ops.py", "def f():\n    try:\n        g()\n    except:\n        return None", "hides the error"),
    (checks.silent_except, "comm/ops.py", "with contextlib.suppress(Exception):\n    f()", "suppresses every exception"),
    (checks.documented, "comm/ops.py", "x = 1", "says nothing about itself"),
    (checks.documented, "comm/ops.py", "'''Doc.'''\n__all__ = ['a']\ndef a(): ...", "a is public and has no docstring"),
    (checks.no_shell, "launch/plan.py", "subprocess.run('ls', shell=True)", "shell=..."),
    (checks.no_shell, "launch/plan.py", "os.system('ls')", "os.system goes through a shell"),
    (checks.set_order, "strategies/ddp.py", "seen: WeakSet[int] = WeakSet()\nfor one in seen:\n    f(one)", "walks the set seen"),
    (checks.set_order, "strategies/ddp.py", "x = [f(y) for y in {1, 2} | z]", "walks the set {1, 2} | z"),
    (checks.set_order, "step/a.py", "def f(self):\n    self.a = set()\n    return [g(x) for x in list(self.a)]", "the set list(self.a)"),
]


@pytest.mark.parametrize(("check", "path", "text", "complaint"), BAD, ids=lambda value: getattr(value, "__name__", None))
def test_a_bad_example_is_found(check, path, text, complaint):
    assert any(complaint in found for found in check(path, text))


def test_every_check_has_a_bad_example():
    assert {check for check, *_ in BAD} == set(checks.CHECKS)


GOOD = [
    (checks.layers, "comm/ops.py", "from slipstream.errors import X\nfrom slipstream.comm import tree\nfrom . import tree"),
    (checks.layers, "comm/ops.py", "if TYPE_CHECKING:\n    from slipstream.runtime.state import PartialState"),
    (checks.variables, "launch/plan.py", "def f(environ):\n    return environ['X']"),
    (checks.torch_at_import, "launch/elastic.py", "def f():\n    import torch"),
    (checks.exports, "comm/ops.py", "from slipstream.errors import X\n__all__ = ['a']\ndef a(): ...\ndef _b(): ..."),
    (checks.exports, "utils.py", f"{LAZY}__all__ = ['a']"),
    (checks.device_names, "comm/ops.py", "def f():\n    '''Not for mps.'''\n    return 'ramps up xlarge'"),
    (checks.mutable_state, "comm/ops.py", "TABLE = {}\n_TABLE = []\n__all__ = []\ndef f():\n    local = {}"),
    (checks.silent_except, "comm/ops.py", "try:\n    f()\nexcept OSError:\n    pass"),
    (checks.silent_except, "comm/ops.py", "try:\n    f()\nexcept Exception as error:\n    raise X from error"),
]


@pytest.mark.parametrize(("check", "path", "text"), GOOD, ids=lambda value: getattr(value, "__name__", None))
def test_a_good_example_is_left_alone(check, path, text):
    assert list(check(path, text)) == []


def test_a_cycle_is_found_through_functions_but_not_through_types():
    a = "def f():\n    from slipstream.comm import b"
    assert checks.cycles({"comm/a.py": a, "comm/b.py": "from slipstream.comm.a import f"}) == ["comm.a -> comm.b -> comm.a"]
    assert checks.cycles({"comm/a.py": a, "comm/b.py": "if TYPE_CHECKING:\n    from slipstream.comm.a import f"}) == []


@pytest.mark.parametrize(
    "table", [checks.MAY_TOUCH_VARIABLES, checks.MAY_NAME_DEVICES, checks.MAY_HOLD_STATE], ids=["variables", "devices", "state"]
)
def test_exceptions_are_for_files_that_exist_and_give_a_reason(table):
    assert {path: reason for path, reason in table.items() if path not in SOURCES or not reason} == {}


def in_a_fresh_interpreter(program: str) -> str:
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=100).stdout.strip()


def test_import_slipstream_imports_no_torch():
    assert in_a_fresh_interpreter("import sys, slipstream; print('torch' in sys.modules)") == "False"


def test_torch_free_rooms_import_no_torch_by_any_way():
    modules = [name for name in module_names() if name.split(".")[1:2] and name.split(".")[1] in checks.TORCH_FREE]
    assert len(modules) > 10
    program = f"""
import importlib, sys
for name in {modules!r}:
    importlib.import_module(name)
    if "torch" in sys.modules:
        sys.exit(print(name))
"""
    assert in_a_fresh_interpreter(program) == "", "this module brings torch along"


def module_names() -> Iterator[str]:
    yield "slipstream"
    for found in pkgutil.walk_packages([str(SOURCE)], "slipstream."):
        yield found.name


@pytest.mark.parametrize("name", [name for name in module_names() if not name.endswith("__main__")])
def test_what_all_promises_can_be_had(name):
    """By importing, so that lazy names count: each can be fetched, and `dir` shows it."""
    module = importlib.import_module(name)
    promised = getattr(module, "__all__", [])
    assert [one for one in promised if not hasattr(module, one) or one not in dir(module)] == []


def test_every_option_has_help():
    assert [option.name for option in OPTIONS.values() if not option.help.strip()] == []


@pytest.mark.parametrize("option", TRAVELLERS, ids=lambda option: option.name)
def test_every_option_survives_the_round_trip(option, tmp_path):
    """Flag, file, variable and the way to the worker: the same value arrives."""
    for value in samples(option):
        assert {place: choice.value for place, choice in travel(option, value, tmp_path).items() if choice.value != value} == {}


def test_test_files_have_names_of_their_own():
    """pytest imports them by file name alone, except for conftest.py."""
    names = [path.name for path in Path(__file__).parent.rglob("*.py") if path.name != "conftest.py"]
    assert [name for name in names if names.count(name) > 1] == []
