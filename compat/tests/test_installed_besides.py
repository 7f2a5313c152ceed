"""The original installed besides the drop-in, and clients newer than those that were tested: both are said, once, and cost nothing."""

from __future__ import annotations

import subprocess
import sys
import types
import warnings
from pathlib import Path

import pytest
from accelerate import Accelerator, _installation


def test_the_original_on_the_path_is_named_where_it_is(tmp_path: Path) -> None:
    (tmp_path / "accelerate-1.15.0.dist-info").mkdir()
    (tmp_path / "accelerate-1.15.0+slipstream.dist-info").mkdir()
    (tmp_path / "accelerated_tomography-2.0.dist-info").mkdir()
    found = _installation.find_originals([str(tmp_path), str(tmp_path / "missing")], tmp_path)
    assert found == [f"accelerate 1.15.0 is installed too, in {tmp_path}"]
    with pytest.warns(UserWarning, match=r"found the drop-in.*accelerate 1\.15\.0 is installed too.*pip uninstall accelerate"):
        _installation.warn_of_original([str(tmp_path)], tmp_path)


def test_files_of_the_original_in_the_folder_of_the_drop_in_are_found(tmp_path: Path) -> None:
    left = tmp_path / "commands" / "menu" / "selection_menu.py"
    left.parent.mkdir(parents=True)
    left.touch()
    assert _installation.find_originals([], tmp_path) == [f"a file of the original is in its folder: {left}"]


def test_the_first_import_says_so(tmp_path: Path) -> None:
    """In a fresh interpreter, with the metadata of the original in a folder of its path; and without, nothing is said."""
    (tmp_path / "accelerate-1.14.0.dist-info").mkdir()
    program = f"import sys; sys.path.append({str(tmp_path)!r}); import accelerate; import accelerate.utils; import accelerate"
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60).stderr
    assert said.count("accelerate 1.14.0 is installed too") == 1
    said = subprocess.run([sys.executable, "-c", "import accelerate"], capture_output=True, text=True, check=True, timeout=60).stderr
    assert said == ""


@pytest.mark.parametrize(
    ("version", "warns"), [("5.22.2", False), ("5.9", False), ("5.22.3", True), ("6.0.0.dev0", True), ("5.100", True), (None, False)]
)
def test_a_client_newer_than_the_tested_one_is_warned_of_once(monkeypatch: pytest.MonkeyPatch, version: str | None, warns: bool) -> None:
    client = types.ModuleType("transformers")
    if version is not None:
        client.__version__ = version
    monkeypatch.setitem(sys.modules, "transformers", client)
    monkeypatch.setattr(_installation, "_said", set())
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        Accelerator(cpu=True)
        Accelerator(cpu=True)
    texts = [str(entry.message) for entry in said if "newer than" in str(entry.message)]
    assert len(texts) == warns
    if warns:
        assert texts[0].startswith(f"transformers {version} is newer than what")
        assert "(up to 5.22.2)" in texts[0]
        assert said[0].filename == __file__


def test_the_tested_versions_are_those_of_the_constraints() -> None:
    constraints = (Path(__file__).parents[2] / "constraints.txt").read_text(encoding="utf-8").split()
    pinned = dict(line.split("==") for line in constraints if "==" in line)
    assert {name: pinned.get(name, version) for name, version in _installation.TESTED.items()} == _installation.TESTED
