"""The rules of the source tree: sizes, layers, cycles, variables, torch-free rooms, exports, devices, state.

The checks are functions in `shape_checks.py`. They run on the tree, and on bad examples, so that none passes by
checking nothing.
"""

from __future__ import annotations

import ast
import importlib
import pkgutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import shape_checks as checks
from slipstream.config import OPTIONS

SOURCE = Path(__file__).parent.parent / "src" / "slipstream"
SOURCES = {path.relative_to(SOURCE).as_posix(): path.read_text() for path in sorted(SOURCE.rglob("*.py"))}


@pytest.fixture(scope="module", autouse=True)
def _clear_syntax_trees() -> Iterator[None]:
    """Drop the syntax trees after the tests: every later garbage collection would walk them."""
    yield
    checks.tree_of.cache_clear()
    checks.nodes_of.cache_clear()


def complaints(check: checks.Check) -> list[str]:
    return [f"{path}: {complaint}" for path, text in SOURCES.items() for complaint in check(path, text)]


@pytest.mark.parametrize("check", checks.CHECKS, ids=lambda check: check.__name__)
def test_tree(check):
    """The source tree passes every check."""
    assert complaints(check) == []


def test_no_import_cycles():
    """No module imports itself through others."""
    assert checks.cycles(SOURCES) == []


LAZY = "__all__, __getattr__, __dir__ = lazy_attributes(__name__, {})\n"
BAD = [
    (checks.file_length, "distributed/collectives.py", "x = 1\n" * 701, "701 lines"),
    (checks.function_length, "distributed/collectives.py", "def long():\n" + "    x = 1\n" * 60, "long has 61 lines"),
    (
        checks.layers,
        "distributed/collectives.py",
        "from slipstream.training.clip import GradientClipper",
        "distributed (layer 3) imports training (layer 6)",
    ),
    (checks.layers, "devices/table.py", "def f():\n    import slipstream.launch.plan", "devices (layer 2) imports launch (layer 2)"),
    (checks.layers, "config/a.py", "from ..utils import x", "config (layer 1) imports utils"),
    (checks.layers, "config/a.py", "from slipstream import PartialState", "imports PartialState, whose room has no layer"),
    (checks.layers, "novelty/a.py", "", "the room novelty has no layer"),
    (checks.variables, "launch/plan.py", "import os\nos.environ['X'] = '1'", "os.environ"),
    (checks.variables, "launch/plan.py", "import os\nos.getenv('X')", "os.getenv"),
    (checks.variables, "launch/plan.py", "from os import environ", "from os import environ"),
    (checks.torch_at_import, "launch/plan.py", "try:\n    import torch.distributed\nexcept ImportError:\n    pass", "imports torch"),
    (checks.torch_at_import, "cli/env.py", "class A:\n    from torch import nn", "imports torch"),
    (checks.exports, "distributed/collectives.py", "def gather(): ...", "has no __all__, but defines gather"),
    (checks.exports, "distributed/collectives.py", "__all__ = ['a']\ndef a(): ...\ndef b(): ...", "visible but not in __all__: b"),
    (
        checks.exports,
        "distributed/collectives.py",
        "__all__ = ['a', 'b']\ndef a(): ...",
        "in __all__ but neither defined nor imported here: b",
    ),
    (checks.exports, "distributed/collectives.py", "__all__ = ['a', 'a']\ndef a(): ...", "repeats a"),
    (
        checks.exports,
        "distributed/__init__.py",
        "from slipstream.distributed.collectives import a, b\n__all__ = ['a']",
        "visible but not in __all__: b",
    ),
    (checks.device_names, "distributed/collectives.py", "x.is_cuda", "names the device family cuda"),
    (checks.device_names, "launch/plan.py", "name = f'{x}CUDA_VISIBLE_DEVICES'", "names the device family cuda"),
    (checks.device_names, "distributed/collectives.py", "def to_mps(npu=None): ...", "names the device family npu"),
    (checks.device_names, "distributed/collectives.py", "import torch_xla as x", "names the device family xla"),
    (checks.mutable_state, "distributed/collectives.py", "cache = {}", "cache is state"),
    (checks.mutable_state, "distributed/collectives.py", "_seen: set[int] = set()", "_seen is state"),
    (checks.mutable_state, "distributed/collectives.py", "import threading\nx = threading.local()", "x is state"),
    (checks.mutable_state, "distributed/collectives.py", "class Borg:\n    _shared = {}", "_shared is state"),
    (checks.mutable_state, "distributed/collectives.py", "def f():\n    global count\n    count = 1", "global count"),
    (checks.silent_except, "distributed/collectives.py", "try:\n    f()\nexcept Exception:\n    pass", "hides the error"),
    (
        checks.silent_except,
        "distributed/collectives.py",
        "try:\n    f()\nexcept (ValueError, BaseException):\n    'no matter'",
        "hides the error",
    ),
    (
        checks.silent_except,
        "distributed/collectives.py",
        "def f():\n    try:\n        g()\n    except:\n        return None",
        "hides the error",
    ),
    (checks.silent_except, "distributed/collectives.py", "with contextlib.suppress(Exception):\n    f()", "suppresses every exception"),
    (checks.documented, "distributed/collectives.py", "x = 1", "says nothing about itself"),
    (checks.documented, "distributed/collectives.py", "'''Doc.'''\n__all__ = ['a']\ndef a(): ...", "a is public and has no docstring"),
    (checks.no_shell, "launch/plan.py", "subprocess.run('ls', shell=True)", "shell=..."),
    (checks.no_shell, "launch/plan.py", "os.system('ls')", "os.system goes through a shell"),
    (checks.set_order, "strategies/ddp.py", "seen: WeakSet[int] = WeakSet()\nfor item in seen:\n    f(item)", "walks the set seen"),
    (checks.set_order, "strategies/ddp.py", "x = [f(y) for y in {1, 2} | z]", "walks the set {1, 2} | z"),
    (checks.gerunds, "checkpoint/taking.py", "", "the module is named taking"),
    (checks.fenced_internals, "training/a.py", "x = torch._C._anything", "uses torch._C._anything without"),
    (checks.fenced_internals, "training/a.py", "from torch._dynamo import x", "uses torch._dynamo without"),
    (checks.set_order, "training/a.py", "def f(self):\n    self.a = set()\n    return [g(x) for x in list(self.a)]", "set list(self.a)"),
]


@pytest.mark.parametrize(("check", "path", "text", "complaint"), BAD, ids=lambda value: getattr(value, "__name__", None))
def test_bad_examples(check, path, text, complaint):
    """Every check finds its bad examples."""
    assert any(complaint in found for found in check(path, text))


def test_class_names_are_unique():
    """No two public classes of the tree share a name."""
    assert checks.shared_class_names(SOURCES) == []
    assert checks.shared_class_names({"a.py": "class A: ...", "b.py": "class A: ..."}) == ["A: a.py, b.py"]


def test_modules_are_used():
    """No module is imported by tests alone."""
    assert checks.unused_modules(SOURCES) == []
    assert checks.unused_modules({"a/b.py": "", "a/c.py": "from slipstream.a import d", "a/d.py": ""}) == ["a/b.py", "a/c.py"]


def test_named_files_exist():
    """Docstrings, comments and documents name only files that exist."""
    root = SOURCE.parents[1]
    prose = {path.name: path.read_text() for path in (*root.glob("*.md"), *root.glob("docs/*.md")) if path.name != "CHANGELOG.md"}
    folders = (root, SOURCE, root / "src", root / "tests")
    examples = ("path/file.py",)  # of what a user writes

    def exists(name: str) -> bool:
        return name in examples or any((folder / name).exists() for folder in folders)

    assert [told for path, text in {**SOURCES, **prose}.items() for told in checks.missing_files(path, text, exists)] == []
    assert list(checks.missing_files("a.py", "# see `no/such.py`", exists)) == ["a.py:1: names no/such.py, which does not exist"]


def test_bad_examples_complete():
    """Every check has a bad example."""
    assert {check for check, *_ in BAD} == set(checks.CHECKS)


GOOD = [
    (checks.layers, "distributed/codec.py", "from slipstream.errors import X\nfrom slipstream.distributed import pytree\nfrom . import a"),
    (checks.layers, "distributed/collectives.py", "if TYPE_CHECKING:\n    from slipstream.training.clip import GradientClipper"),
    (checks.variables, "launch/plan.py", "def f(environ):\n    return environ['X']"),
    (checks.torch_at_import, "launch/agent.py", "def f():\n    import torch"),
    (checks.exports, "distributed/collectives.py", "from slipstream.errors import X\n__all__ = ['a']\ndef a(): ...\ndef _b(): ..."),
    (checks.exports, "utils.py", f"{LAZY}helper = 1"),
    (checks.device_names, "distributed/collectives.py", "def f():\n    '''Not for mps.'''\n    return 'ramps up xlarge'"),
    (checks.mutable_state, "distributed/collectives.py", "TABLE = {}\n_TABLE = []\n__all__ = []\ndef f():\n    local = {}"),
    (checks.silent_except, "distributed/collectives.py", "try:\n    f()\nexcept OSError:\n    pass"),
    (checks.silent_except, "distributed/collectives.py", "try:\n    f()\nexcept Exception as error:\n    raise X from error"),
]


@pytest.mark.parametrize(("check", "path", "text"), GOOD, ids=lambda value: getattr(value, "__name__", None))
def test_good_examples(check, path, text):
    """No check complains about its good examples."""
    assert list(check(path, text)) == []


def test_cycle_detection():
    """A cycle is found through imports in functions, but not through imports for type checking."""
    a = "def f():\n    from slipstream.data import b"
    assert checks.cycles({"data/a.py": a, "data/b.py": "from slipstream.data.a import f"}) == ["data.a -> data.b -> data.a"]
    assert checks.cycles({"data/a.py": a, "data/b.py": "if TYPE_CHECKING:\n    from slipstream.data.a import f"}) == []


@pytest.mark.parametrize(
    "table",
    [checks.MAY_TOUCH_VARIABLES, checks.MAY_NAME_DEVICES, checks.MAY_HOLD_STATE, checks.MAY_BE_A_GERUND, checks.MAY_BE_UNUSED],
    ids=["variables", "devices", "state", "gerunds", "unused"],
)
def test_exception_tables(table):
    """Exceptions to a rule are for files that exist, and give a reason."""
    assert {path: reason for path, reason in table.items() if path not in SOURCES or not reason} == {}


def test_contributing_shows_the_layers():
    """The table of CONTRIBUTING.md is the one that the checks use; on failure, paste the expected text."""
    assert checks.layer_table(lambda name: (SOURCE / name).exists()) in (SOURCE.parents[1] / "CONTRIBUTING.md").read_text()


def run_in_new_interpreter(program: str) -> str:
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=100).stdout.strip()


STEP = """
import sys, torch
from torch.utils.data import DataLoader, TensorDataset
import slipstream
accelerator = slipstream.Accelerator(cpu=True)
model = torch.nn.Linear(2, 1)
optimizer, data = torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(TensorDataset(torch.ones(8, 2)), batch_size=4)
model, optimizer, data = accelerator.prepare(model, optimizer, data)
for (inputs,) in data:
    accelerator.backward(model(inputs).mean())
    optimizer.step()
    optimizer.zero_grad()
print(sum(name.startswith("slipstream") for name in sys.modules))
"""


def test_modules_of_a_step():
    """`Accelerator()`, `prepare` and a training step import at most 90 of our modules."""
    assert int(run_in_new_interpreter(STEP).splitlines()[-1]) <= 90


def test_import_without_torch():
    """`import slipstream` does not import torch."""
    assert run_in_new_interpreter("import sys, slipstream; print('torch' in sys.modules)") == "False"


def test_torch_free_rooms():
    """Importing the torch-free rooms does not import torch, directly or indirectly."""
    modules = [name for name in module_names() if name.split(".", 1)[-1].replace(".", "/").startswith(checks.TORCH_FREE)]
    assert len(modules) > 10
    program = f"""
import importlib, sys
for name in {modules!r}:
    importlib.import_module(name)
    if "torch" in sys.modules:
        sys.exit(print(name))
"""
    assert run_in_new_interpreter(program) == "", "this module imports torch"


def module_names() -> Iterator[str]:
    yield "slipstream"
    for found in pkgutil.walk_packages([str(SOURCE)], "slipstream."):
        yield found.name


@pytest.mark.parametrize("name", [name for name in module_names() if not name.endswith("__main__")])
def test_exported_names(name):
    """Every name in `__all__`, lazy ones included, can be fetched, and `dir` shows it."""
    if name.startswith("slipstream.integrations."):
        pytest.importorskip(name.split(".")[2], reason="a module of an integration is there where its framework is")
    module = importlib.import_module(name)
    promised = getattr(module, "__all__", [])
    assert [entry for entry in promised if not hasattr(module, entry) or entry not in dir(module)] == []


@pytest.mark.parametrize("name", ["slipstream", "slipstream.utils", "slipstream.inference"])
def test_stubs_list_the_lazy_names(name):
    """A lazy module and the stub that type checkers read offer the same names, from the same modules."""
    module = importlib.import_module(name)
    stub = ast.parse((Path(module.__file__).with_suffix(".pyi")).read_text())
    shown = {alias.asname: node.module for node in stub.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert sorted(shown) == module.__all__
    assert {name for name, home in shown.items() if getattr(importlib.import_module(home), name) is not getattr(module, name)} == set()


def test_option_help():
    """Every option has a help text."""
    assert [option.name for option in OPTIONS.values() if not option.help.strip()] == []


def test_unique_test_files():
    """Test files have unique names, because pytest imports them by file name alone, except for conftest.py."""
    names = [path.name for path in Path(__file__).parent.rglob("*.py") if path.name != "conftest.py"]
    assert [name for name in names if names.count(name) > 1] == []
