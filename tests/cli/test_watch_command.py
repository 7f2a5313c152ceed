"""The command `slipstream watch`: what it prints, how it ends, and what it says to bad input."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from slipstream.cli.main import main
from slipstream.observability.report.server import ReportServer
from slipstream.observability.run_dir.folder import RunFolder

COMMAND = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
from slipstream.cli.main import main
code = main(sys.argv[1:])
print("torch" in sys.modules, "numpy" in sys.modules, flush=True)
sys.exit(code)
"""


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    return RunFolder.create(tmp_path, "first", project="spirals")


def test_it_says_where_the_page_is_and_ctrl_c_ends_it_with_a_page_open(run: RunFolder, tmp_path: Path) -> None:
    arguments = [sys.executable, "-c", COMMAND, "watch", str(tmp_path), "--port", "0"]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        line = process.stdout.readline()
        assert line.startswith("Watching 1 run at http://127.0.0.1:")
        url = line.split()[4]
        with urllib.request.urlopen(f"{url}api/runs", timeout=30) as answer:
            assert [entry["name"] for entry in json.load(answer)] == ["first"]
        with urllib.request.urlopen(f"{url}api/events", timeout=30) as stream:
            assert stream.readline() == b"retry: 1000\n"
            process.send_signal(signal.SIGINT)
            stream.read()
        assert process.wait(timeout=60) == 0, "it ended as it was meant to"
        assert process.stdout.read() == "False False\n", "without torch and numpy"
        assert process.stderr.read().strip() == ""


def test_bad_input_is_two_lines_and_exit_code_2(run: RunFolder, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def refused(*arguments: str) -> str:
        assert main(["watch", *arguments]) == 2
        said = capsys.readouterr()
        assert said.out == ""
        assert "Traceback" not in said.err
        return said.err

    assert "does not exist" in refused(str(tmp_path / "nothing"))
    (tmp_path / "empty").mkdir()
    assert "has no run in it (there is: nothing)" in refused(str(tmp_path / "empty"), "--terminal")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert f"Port {port} on 127.0.0.1 is in use" in refused(str(tmp_path), "--port", port)
    assert "70000" in refused(str(tmp_path), "--port", "70000")
    assert "not an address of this machine" in refused(str(tmp_path), "--port", "0", "--host", "192.0.2.1")
    assert "--port and --open would do nothing" in refused(str(tmp_path), "--terminal", "--port", "1", "--open")
    assert "PATH" in refused()


def test_a_host_that_others_reach_is_told(
    run: RunFolder, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ReportServer, "serve", ReportServer.server_close)
    assert main(["watch", str(tmp_path), "--port", "0", "--host", "0.0.0.0"]) == 0
    said = capsys.readouterr()
    assert "Everybody who can reach 0.0.0.0" in said.err
    assert "http://127.0.0.1:" in said.out
    assert main(["watch", str(tmp_path), "--port", "0", "--host", "localhost"]) == 0
    assert capsys.readouterr().err == ""


def test_runs_that_cannot_be_read_are_told_and_a_folder_may_have_none_yet(
    run: RunFolder, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ReportServer, "serve", ReportServer.server_close)
    (tmp_path / "runs" / "bro\x1bken").mkdir()
    (tmp_path / "runs" / "bro\x1bken" / "run.json").touch()
    (tmp_path / "later").mkdir()
    assert main(["watch", str(tmp_path), "--port", "0"]) == 0
    said = capsys.readouterr()
    assert said.out.startswith("Watching 1 run at")
    assert said.err.startswith("Left out: ")
    assert "bro\\x1bken" in said.err
    assert said.err.count("\n") == 1
    assert main(["watch", str(tmp_path / "later"), "--port", "0"]) == 0
    assert capsys.readouterr().out.startswith("Watching for the first run at")
    assert main(["watch", str(tmp_path), "--terminal"]) == 0
    assert "left out: " in capsys.readouterr().out.replace("\n", " ")


def test_without_a_terminal_one_picture_is_printed(run: RunFolder, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["watch", str(tmp_path), "--terminal"]) == 0
    assert capsys.readouterr().out.startswith("first  running")
