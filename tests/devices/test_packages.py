"""Packages: found without being imported, compared as PEP 440 says."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import assume, given, strategies as st
from packaging.version import Version

from slipstream.devices import packages
from slipstream.devices.packages import PACKAGES, Package, compare_versions, installed, is_torch_version, parse_version
from slipstream.errors import ConfigError

_NUMBERS = st.lists(st.integers(0, 20), min_size=1, max_size=4).map(lambda parts: ".".join(map(str, parts)))
_VERSIONS = st.builds(
    lambda release, pre, post, dev: release + pre + post + dev,
    _NUMBERS,
    st.sampled_from(["", "a1", "b2", "rc1", "rc2", "-beta.3", "c4"]),
    st.sampled_from(["", ".post1", "-2", ".rev3"]),
    st.sampled_from(["", ".dev0", ".dev20260101"]),
)


@given(_VERSIONS, _VERSIONS)
def test_versions_sort_as_the_reference_sorts_them(text: str, other: str) -> None:
    left, right = parse_version(text), parse_version(other)
    assert (left < right, left == right) == (Version(text) < Version(other), Version(text) == Version(other))


@given(_VERSIONS)
def test_the_local_part_does_not_count(version: str) -> None:
    assert parse_version(version + "+cpu") == parse_version(version)


@given(st.text(max_size=8))
def test_other_texts_are_errors(text: str) -> None:
    try:
        Version(text)
    except ValueError:
        with pytest.raises(ConfigError, match="version"):
            parse_version(text)
    else:
        assume(False)


def test_comparing_an_installed_library() -> None:
    assert compare_versions("pytest", ">=", "8.0")
    assert not compare_versions("pytest", "<", "8.0")


def test_comparing_something_that_is_not_there_is_an_error() -> None:
    with pytest.raises(ConfigError, match="no-such-library"):
        compare_versions("no-such-library", ">", "1")
    with pytest.raises(ConfigError, match="=>"):
        compare_versions("1.0", "=>", "1.0")


def test_a_nightly_torch_counts_as_the_release_it_leads_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packages, "version_of", lambda name: "2.14.0.dev20260901+cu130")
    assert is_torch_version("==", "2.14")


def test_every_question_has_a_row_and_an_honest_name() -> None:
    for name in PACKAGES:
        question = getattr(packages, f"is_{name}_available")
        assert question.__name__ == f"is_{name}_available"
        assert question.__doc__
        assert question() in (True, False)


def test_what_is_installed_is_found_and_not_imported() -> None:
    code = (
        "import sys\nfrom slipstream.devices import packages as p\n"
        "assert p.is_numpy_available() and p.is_pytest_available() and p.is_rich_available() and p.is_tqdm_available()\n"
        "assert not {'numpy', 'pytest', 'rich', 'tqdm', 'torch'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_a_folder_of_the_same_name_is_not_a_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "folder_not_package").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(PACKAGES, "probe", Package(("folder_not_package",), ("probe",)))
    assert not installed("probe")


def test_a_version_outside_the_bounds_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PACKAGES, "old", Package(("pytest",), ("pytest",), below="2.0"))
    monkeypatch.setitem(PACKAGES, "new", Package(("pytest",), ("pytest",), minimum="999"))
    monkeypatch.setitem(PACKAGES, "any", Package(("pytest",), ("no-such-distribution", "pytest"), minimum="1.0"))
    assert [installed(name) for name in ("old", "new", "any")] == [False, False, True]


def test_a_function_that_needs_a_package_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    @packages.deepspeed_required
    def train() -> str:
        return "trained"

    monkeypatch.setitem(PACKAGES, "deepspeed", Package(("no_such_module",), ("deepspeed",)))
    with pytest.raises(ImportError, match="train needs deepspeed.*pip install deepspeed"):
        train()
    monkeypatch.setitem(PACKAGES, "deepspeed", Package(("pytest",), ("pytest",)))
    assert train() == "trained"


def test_torch_has_what_the_supported_versions_have() -> None:
    assert packages.is_torch_distributed_available()
    assert packages.is_pippy_available()
    assert packages.is_weights_only_available()
