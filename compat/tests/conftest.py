"""What the tests of the drop-in share: the import name `accelerate`, a clean state after each test, and a way to launch scripts.

The development environment has no distribution named `accelerate`. `make test` installs the drop-in to `.venv/dropin`; these tests put it
on the path, behind the sources, so that they see each change, and the metadata and the command exist for them alone. In an environment
where the drop-in is installed (`.venv-ecosystem`) nothing is added.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path

import pytest

pytest_plugins = ["slipstream.testing.plugin"]

COMPAT = Path(__file__).resolve().parents[1]
DROPIN = Path(sys.prefix) / "dropin"


def _installed_version() -> str | None:
    try:
        return metadata.version("accelerate")
    except metadata.PackageNotFoundError:
        return None


def pytest_configure(config: pytest.Config) -> None:
    if _installed_version() is None:
        if not DROPIN.is_dir():
            raise pytest.UsageError(f"The drop-in is not installed in {DROPIN}. Run `make dropin` (or `make test`) first.")
        added = [str(COMPAT / "src"), str(DROPIN)]
        sys.path[:0] = added
        os.environ["PYTHONPATH"] = os.pathsep.join([*added, *filter(None, [os.environ.get("PYTHONPATH")])])
        os.environ["PATH"] = os.pathsep.join([str(DROPIN / "bin"), str(Path(sys.executable).parent), os.environ["PATH"]])
    if not (_installed_version() or "").endswith("+slipstream"):
        raise pytest.UsageError(f"These tests are for the drop-in; the `accelerate` that is installed is {_installed_version()}.")
    os.environ["OMP_NUM_THREADS"] = "1"  # several processes share few cores
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    os.environ["HF_HUB_OFFLINE"] = "1"  # models are built from configs; nothing is downloaded


def pytest_collection_finish() -> None:
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)


@pytest.fixture(autouse=True)
def _clean_state() -> Iterator[None]:
    """Each test makes its own state: what it leaves behind (states, process group, variables) is removed."""
    before = dict(os.environ)
    yield
    if "accelerate.state" in sys.modules:
        sys.modules["accelerate.state"].AcceleratorState._reset_state(reset_partial_state=True)
        sys.modules["accelerate.state"].GradientState._reset_state()
    if "slipstream.distributed.current" in sys.modules:
        sys.modules["slipstream.distributed.current"].reset()
    if dict(os.environ) != before:
        os.environ.clear()
        os.environ.update(before)


Launch = Callable[..., str]


@pytest.fixture
def launch(tmp_path: Path) -> Launch:
    """`launch(script, 2, "--epochs", 3)`: run a script (a path, or its text) through `accelerate launch` and return what it wrote.

    `options` come before the script, `environ` is added to the environment. It runs on the CPU unless `environ` names a device. A failure
    of the script fails the test with its output; with `fails=True` success does.
    """

    def run(
        script: Path | str,
        num_processes: int = 1,
        *arguments: object,
        options: tuple[object, ...] = (),
        environ: dict[str, str] | None = None,
        fails: bool = False,
        timeout: float = 100,
    ) -> str:
        if not isinstance(script, Path):
            source, script = script, tmp_path / "script.py"
            script.write_text(textwrap.dedent(source), encoding="utf-8")
        place = () if environ and "SLIPSTREAM_DEVICE" in environ else ("--cpu",)
        started_by = [sys.executable, "-m", "accelerate.commands.launch", *place, "--num_processes", num_processes, *options]
        words = [str(word) for word in (*started_by, script, *arguments)]
        ended = subprocess.run(
            words,
            env={**os.environ, **(environ or {})},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            text=True,
            timeout=timeout,
            cwd=tmp_path,
        )
        if (ended.returncode != 0) is not fails:
            pytest.fail(f"`{' '.join(words)}` ended with exit code {ended.returncode} and wrote:\n{ended.stdout}", pytrace=False)
        return ended.stdout

    return run


@pytest.fixture
def accelerate_command() -> str:
    """The path of the console command `accelerate`."""
    found = shutil.which("accelerate") or shutil.which("accelerate", path=str(Path(sys.executable).parent))
    assert found is not None
    return found
