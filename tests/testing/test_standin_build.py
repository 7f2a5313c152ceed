"""Building the stand-in device: what is missing is a reason, and nothing is built twice."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from slipstream.testing.standin import StandinUnavailable, extension_file
from slipstream.testing.standin.build import cache_folder


def test_no_compiler(monkeypatch, tmp_path):
    """Without a compiler the error names what was looked for and what to install."""
    monkeypatch.setenv("SLIPSTREAM_STANDIN_CACHE", str(tmp_path))
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(StandinUnavailable, match="no compiler 'no-such-compiler' here; install g\\+\\+"):
        extension_file()


def test_unwritable_cache(monkeypatch, tmp_path):
    """A cache that cannot be written is named, with the variable that moves it."""
    (tmp_path / "taken").write_text("a file, not a folder")
    monkeypatch.setenv("SLIPSTREAM_STANDIN_CACHE", str(tmp_path / "taken"))
    with pytest.raises(StandinUnavailable, match="taken/torch-.* cannot be written .*; set SLIPSTREAM_STANDIN_CACHE"):
        extension_file()


def test_headers_that_do_not_fit(monkeypatch, tmp_path):
    """A compiler that rejects torch's headers is quoted, with torch's version; nothing is left that looks built."""
    compiler = tmp_path / "broken-c++"
    compiler.write_text(
        '#!/bin/sh\ncase "$*" in *-c*) echo "Device.h:12:3: error: no member named unheard_of" >&2; exit 1;; esac\necho "g++ 12.2.0"\n'
    )
    compiler.chmod(0o755)
    monkeypatch.setenv("SLIPSTREAM_STANDIN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("CXX", str(compiler))
    with pytest.raises(StandinUnavailable, match=r"could not be built with torch 2\..*Device.h:12:3: error: no member named unheard_of"):
        extension_file()
    assert [file.name for file in (tmp_path / "cache").rglob("*") if file.is_file()] == ["lock"]


def test_built_once(standin, monkeypatch, tmp_path):
    """A second process finds what was built: it compiles nothing, and prints nothing."""
    file = extension_file()
    changed = file.stat().st_mtime_ns
    program = (
        "from slipstream.testing import standin; standin.enable(); standin.enable(); "
        "import torch; print(torch.ones(2, device='standin').sum())"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert "tensor(2., device='standin:0')" in done.stdout
    assert done.stderr == ""
    assert file.stat().st_mtime_ns == changed


def test_cache_folder(monkeypatch, tmp_path):
    """The cache is where the variable says, else below the user's cache folder."""
    monkeypatch.setenv("SLIPSTREAM_STANDIN_CACHE", str(tmp_path))
    assert cache_folder() == tmp_path
    monkeypatch.delenv("SLIPSTREAM_STANDIN_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "slipstream" / "standin"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder() == Path(os.path.expanduser("~")) / ".cache" / "slipstream" / "standin"


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("SLIPSTREAM_STANDIN_DEVICES", "many", "SLIPSTREAM_STANDIN_DEVICES='many' is not a number of devices"),
        ("SLIPSTREAM_STANDIN_DEVICES", "99", "ConfigError: SLIPSTREAM_STANDIN_DEVICES=99: there can be 1 to 16 stand-in devices"),
        ("SLIPSTREAM_STANDIN_MEMORY", "1GB", "SLIPSTREAM_STANDIN_MEMORY='1GB' is not a whole number"),
    ],
)
def test_wrong_settings(standin, name, value, message):
    """A setting that cannot be is refused by name."""
    program = "from slipstream.testing import standin; standin.enable()"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env={**os.environ, name: value}, timeout=60)
    assert done.returncode != 0
    assert message in done.stderr
