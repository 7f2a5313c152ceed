"""What every test of this project is held to: no leaks, and a tier that it belongs to.

Tests that use the pool of ranks are marked `ranks` by themselves, so `pytest -m "not ranks and not launched"` runs the quick tier alone.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import sys
from collections.abc import Callable, Generator, Iterator
from typing import Any

import pytest
from hypothesis import settings

from slipstream.devices.packages import TORCH_OF, is_torch_version
from slipstream.testing.standin.build import cache_folder

pytest_plugins = ["slipstream.testing.plugin", "pytester"]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--soak", action="store_true", help="repeat what is repeated in CI a few times as often as `make soak` wants")


def pytest_configure(config: pytest.Config) -> None:
    settings.register_profile("same", derandomize=True, database=None, deadline=None)
    settings.register_profile("explore", deadline=None)
    if not config.getoption("hypothesis_profile", None):  # every run tries the same examples; `--hypothesis-profile explore` tries others
        settings.load_profile("same")
    # From Python 3.14 on, workers of loaders are forked from a server: with torch in it they begin in milliseconds, not in seconds.
    multiprocessing.set_forkserver_preload(["torch", "slipstream.data", "pytest"])
    # Tests that have a home folder of their own find the stand-in accelerator where `make standin` has built it.
    os.environ.setdefault("SLIPSTREAM_STANDIN_CACHE", str(cache_folder()))
    config.addinivalue_line("markers", "soak: repeats something with random faults; `--soak` makes it many rounds")


LONGEST = (
    "test_examples.py",
    "test_docs.py",
    "test_lost_ranks.py",
    "test_launched_machines.py",
    "test_exact_resume.py",
    "test_watchdog.py",
    "test_launched_failures.py",
    "test_kills.py",
    "test_sharded_saves.py",
    "test_fsdp_checkpoints.py",
    "test_notebook.py",
    "test_launched_losses.py",
    "test_batch_size.py",
    "test_hostile.py",
    "test_report_page.py",
    "test_resume.py",
    "test_tracker_packages.py",
)
"""Files that take long. Where several workers share the files, these are begun first, so that no worker is left with one at the end."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if hasattr(config, "workerinput"):
        items.sort(key=lambda item: item.path.name not in LONGEST)
    for item in items:
        if "ranks" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.ranks)


def pytest_collection_finish() -> None:
    """What the collection made lives to the end: collecting garbage, which some tests do often, need not look at it.

    And one thread of torch's, because several wait for each other: on a busy machine, a thousand times longer than a small tensor takes.
    """
    gc.collect()
    gc.freeze()
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)


@pytest.fixture
def rounds(request: pytest.FixtureRequest) -> Callable[..., int]:
    """`rounds(ci=3, soak=50)`: how often to repeat, by where we are."""
    return lambda *, ci, soak: soak if request.config.getoption("--soak") else ci


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, Any, Any]:
    """Skip a test of what needs a later torch than the installed one, as the error says that it raised."""
    try:
        return (yield)
    except Exception as error:
        for feature, (version, _) in TORCH_OF.items():
            if f"{feature} needs torch {version} or later" in str(error) and not is_torch_version(">=", version):
                pytest.skip(f"{feature} needs torch {version} or later")
        raise


def _has_standin() -> bool:
    module = sys.modules.get("slipstream.testing.standin")
    return module is not None and module.is_enabled()


@pytest.fixture(autouse=True)
def _clean(no_leaks: None) -> Iterator[None]:
    """Every test of ours is held to `no_leaks`. None enables the stand-in here, where every later test would be on it."""
    before = _has_standin()
    yield
    if _has_standin() and not before:
        pytest.fail("this test enabled the stand-in in the process of pytest; run it on ranks(1, device='standin')", pytrace=False)
