"""A real browser (Debian's chromium and its driver) for the tests of this folder; where there is none they are skipped, and say why."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "docs" / "pictures"))

from looking import Looker, chromium

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.browser)


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """One browser for all tests of a file."""
    missing = [name for name in ("chromium", "chromedriver") if shutil.which(name) is None]
    if missing:
        pytest.skip(f"{' and '.join(missing)} not found: apt-get install chromium chromium-driver")
    with chromium(tmp_path_factory.mktemp("profile")) as found:
        yield found


@pytest.fixture
def look(driver: Any) -> Iterator[Callable[..., Looker]]:
    """`look(page)` opens a page (a file or an address) and gives what a test does with it; nothing of it may complain in the console."""
    lookers = []

    def opened(page: Path | str, **options: Any) -> Looker:
        lookers.append(Looker(driver, page, **options))
        return lookers[-1]

    yield opened
    complaints = [entry for entry in driver.get_log("browser") if entry["level"] == "SEVERE"]
    driver.get("about:blank")
    assert any(looker.may_complain for looker in lookers) or not complaints, json.dumps(complaints, indent=1)
