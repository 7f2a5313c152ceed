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
def test_version_order_matches_packaging(text: str, other: str) -> None:
    """Versions sort as the reference sorts them."""
    left, right = parse_version(text), parse_version(other)
    assert (left < right, left == right) == (Version(text) < Version(other), Version(text) == Version(other))


@given(_VERSIONS)
def test_local_version_ignored(version: str) -> None:
    """The local part does not count."""
    assert parse_version(version + "+cpu") == parse_version(version)


@given(st.text(max_size=8))
def test_bad_version_text(text: str) -> None:
    """Other texts are errors."""
    try:
        Version(text)
    except ValueError:
        with pytest.raises(ConfigError, match="version"):
            parse_version(text)
    else:
        assume(False)


def test_compare_installed_library() -> None:
    """Comparing an installed library."""
    assert compare_versions("pytest", ">=", "8.0")
    assert not compare_versions("pytest", "<", "8.0")


def test_compare_missing_library() -> None:
    """Comparing something that is not there is an error."""
    with pytest.raises(ConfigError, match="no-such-library"):
        compare_versions("no-such-library", ">", "1")
    with pytest.raises(ConfigError, match="=>"):
        compare_versions("1.0", "=>", "1.0")


def test_nightly_torch_is_release(monkeypatch: pytest.MonkeyPatch) -> None:
    """A nightly torch counts as the release it leads to."""
    monkeypatch.setattr(packages, "version_of", lambda name: "2.14.0.dev20260901+cu130")
    assert is_torch_version("==", "2.14")


def test_sharded_training_on_older_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """A feature that needs a later torch says so, with the versions and what to do; it does not fail inside torch."""
    from slipstream import Accelerator, FullyShardedDataParallelPlugin

    monkeypatch.setattr(packages, "version_of", lambda name: "2.12.1+cpu")
    with pytest.raises(ConfigError, match=r"needs torch 2\.13 or later, and torch 2\.12\.1\+cpu is installed\.\nTrain with replicas"):
        Accelerator(cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin())
    monkeypatch.setattr(packages, "version_of", lambda name: "2.13.0")
    packages.require_torch("Sharded training (FSDP)")


def test_standin_on_older_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stand-in does not try to build with a torch that lacks what it is made of."""
    from slipstream.testing import standin

    monkeypatch.setattr(packages, "version_of", lambda name: "2.8.0+cu128")
    with pytest.raises(standin.StandinUnavailable, match=r"stand-in device needs torch 2\.13 or later, and torch 2\.8\.0.* is installed"):
        standin.extension_file()


def test_every_check_has_row() -> None:
    """Every question has a row and an matching name."""
    for name in PACKAGES:
        question = getattr(packages, f"is_{name}_available")
        assert question.__name__ == f"is_{name}_available"
        assert question.__doc__
        assert question() in (True, False)


def test_installed_found_not_imported() -> None:
    """What is installed is found and not imported."""
    code = (
        "import sys\nfrom slipstream.devices import packages as p\n"
        "assert p.is_numpy_available() and p.is_pytest_available() and p.is_rich_available() and p.is_tqdm_available()\n"
        "assert not {'numpy', 'pytest', 'rich', 'tqdm', 'torch'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_folder_is_not_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder of the same name is not a package."""
    (tmp_path / "folder_not_package").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(PACKAGES, "probe", Package(("folder_not_package",), ("probe",)))
    assert not installed("probe")


def test_version_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """A version outside the bounds does not count."""
    monkeypatch.setitem(PACKAGES, "old", Package(("pytest",), ("pytest",), below="2.0"))
    monkeypatch.setitem(PACKAGES, "new", Package(("pytest",), ("pytest",), minimum="999"))
    monkeypatch.setitem(PACKAGES, "any", Package(("pytest",), ("no-such-distribution", "pytest"), minimum="1.0"))
    assert [installed(name) for name in ("old", "new", "any")] == [False, False, True]


def test_required_decorator(monkeypatch: pytest.MonkeyPatch) -> None:
    """A function that needs a package says so."""
    @packages.deepspeed_required
    def train() -> str:
        return "trained"

    monkeypatch.setitem(PACKAGES, "deepspeed", Package(("no_such_module",), ("deepspeed",)))
    with pytest.raises(ImportError, match="train needs deepspeed.*pip install deepspeed"):
        train()
    monkeypatch.setitem(PACKAGES, "deepspeed", Package(("pytest",), ("pytest",)))
    assert train() == "trained"


def test_torch_feature_checks() -> None:
    """Torch has what the supported versions have."""
    assert packages.is_torch_distributed_available()
    assert packages.is_pippy_available()
    assert packages.is_weights_only_available()
