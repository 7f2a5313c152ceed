"""Output files of workers, and lines copied to the terminal."""

from __future__ import annotations

import os
import stat
import sys

import pytest
from hypothesis import given, strategies as st

from slipstream.errors import ConfigError
from slipstream.launch.output import LogFolder, Tee, announce, parse_tee


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


def test_tee_takes_turns(tmp_path, capfd):
    """A process that prints without end keeps neither the others nor the launcher waiting."""
    (tmp_path / "much").write_bytes(b"y" * 99 + b"\n" + (b"y" * 99 + b"\n") * 30_000)
    (tmp_path / "little").write_bytes(b"hi\n")
    tee = Tee()
    tee.follow(tmp_path / "much", "", 1)
    tee.follow(tmp_path / "little", "", 1)
    assert tee.pump()
    shown = capfd.readouterr().out
    assert shown.endswith("y\nhi\n")
    assert len(shown) < 2_000_000
    tee.finish()
    assert len(shown) + len(capfd.readouterr().out) == 3_000_103


def test_tee_long_line(tmp_path):
    """A line that does not end is shown in parts, so that it is neither held nor joined again and again."""
    line = os.urandom(1 << 20).replace(b"\n", b" ") * 20
    source, shown = tmp_path / "log", tmp_path / "terminal"
    source.write_bytes(line)
    tee, terminal = Tee(), os.open(shown, os.O_WRONLY | os.O_CREAT)
    tee.follow(source, "[1]:", terminal)
    while tee.pump():
        pass
    assert shown.stat().st_size > 1 << 24
    tee.finish()
    os.close(terminal)
    first, second = shown.read_bytes().removesuffix(b"\n").split(b"\n")
    assert first[:4] == second[:4] == b"[1]:"
    assert first[4:] + second[4:] == line


@pytest.mark.parametrize("blocking", [True, False])
def test_tee_terminal_that_nobody_reads(tmp_path, blocking):
    """A pipe that nobody reads blocks neither the copying nor, when the job was asked to stop, the end; once read, it gets the rest."""
    text = b"".join(b"%d\n" % number for number in range(50_000))
    (tmp_path / "log").write_bytes(text)
    reader, writer = os.pipe()
    os.set_blocking(writer, blocking)
    tee = Tee()
    tee.follow(tmp_path / "log", "", writer)
    assert not tee.pump()
    shown = os.read(reader, 1 << 16)
    tee.pump()
    shown += os.read(reader, 1 << 16)
    assert text.startswith(shown)
    tee.pump()
    tee.finish(lambda: 0.0)
    os.close(reader)
    os.close(writer)


def test_tee_terminal_that_fails(tmp_path):
    """A terminal that cannot be written to is reported once and ends nothing."""
    (tmp_path / "log").write_bytes(b"one\n")
    messages: list[str] = []
    tee, terminal = Tee(messages.append), os.open("/dev/full", os.O_WRONLY)
    tee.follow(tmp_path / "log", "", terminal)
    tee.pump()
    (tmp_path / "log").write_bytes(b"one\ntwo\n")
    tee.finish()
    os.close(terminal)
    assert messages == [f"output of the processes is no longer shown: file {terminal} cannot be written: No space left on device"]


def test_closed_streams(tmp_path, monkeypatch):
    """Without standard streams, neither the messages of the launcher nor the copying of lines fail."""
    (tmp_path / "log").write_bytes(b"one\n")
    monkeypatch.setattr(sys, "stdout", None)
    monkeypatch.setattr(sys, "stderr", None)
    announce("slipstream: hello", as_json=False)
    tee, terminal = Tee(), os.open(tmp_path / "terminal", os.O_WRONLY | os.O_CREAT)
    tee.follow(tmp_path / "log", "", terminal)
    tee.finish()
    os.close(terminal)
    assert (tmp_path / "terminal").read_bytes() == b"one\n"
