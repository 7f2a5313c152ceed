"""Output files of workers, and lines copied to the terminal."""

from __future__ import annotations

import os
import stat

import pytest
from hypothesis import given, strategies as st

from slipstream.errors import ConfigError
from slipstream.launch.output import LogFolder, Tee, parse_tee


def test_tee_names_existing_ranks():
    """Tee by rank names only ranks that exist."""
    assert parse_tee("0:1,1:2", 3) == {0: 1, 1: 2, 2: 0}
    with pytest.raises(ConfigError, match="local rank 3"):
        parse_tee("3:1", 3)


def test_log_folder_private_and_temporary(tmp_path):
    """Files are for the user alone and temporary ones go again."""
    kept, temporary = LogFolder(str(tmp_path / "logs"), "run", {0: 3}), LogFolder(None, "run", {})
    for folder in (kept, temporary):
        files = folder.worker_files(0, 5, 0)
        assert stat.S_IMODE(folder.path.stat().st_mode) == 0o700
        assert (files.stdout is None) == (files.stderr is None) == (folder is temporary)
        folder.remove()
    assert kept.path.exists()
    assert not temporary.path.exists()


def test_log_folder_not_writable(tmp_path):
    """A folder for logs that cannot be made is refused."""
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot be used"):
        LogFolder(str(tmp_path / "file"), "run", {})


@given(st.lists(st.binary(max_size=20), max_size=12))
def test_tee_copies_whole_lines(tmp_path_factory, chunks):
    """Tee copies every byte in whole lines."""
    folder = tmp_path_factory.mktemp("tee")
    source, terminal = folder / "source", folder / "terminal"
    source.touch()
    tee = Tee()
    destination = os.open(terminal, os.O_WRONLY | os.O_CREAT)
    tee.follow(source, "", destination)
    with open(source, "ab", buffering=0) as file:
        for chunk in chunks:
            file.write(chunk)
            tee.pump()
            assert terminal.read_bytes() in (b"".join(chunks)[: len(terminal.read_bytes())], b"")
            assert terminal.read_bytes()[-1:] in (b"\n", b"")
    tee.finish()
    os.close(destination)
    everything = b"".join(chunks)
    assert terminal.read_bytes() == everything + (b"" if everything.endswith(b"\n") or not everything else b"\n")


def test_tee_prefixes_rank(tmp_path, capfd):
    """Tee puts the rank before every line."""
    (tmp_path / "log").write_bytes(b"one\ntwo\nthree")
    tee = Tee()
    tee.follow(tmp_path / "log", "[default1]:", 1)
    tee.finish()
    assert capfd.readouterr().out == "[default1]:one\n[default1]:two\n[default1]:three\n"
