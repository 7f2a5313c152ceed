"""`slipstream test`: a real job, a verdict, and options that are refused before anything starts."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from slipstream.cli.test import _command_line, _configuration, command
from slipstream.config import resolve
from slipstream.errors import ConfigError


def _slipstream(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "slipstream", *arguments], capture_output=True, text=True, timeout=100)


@pytest.mark.launched
def test_two_processes_pass() -> None:
    """Two processes pass every check."""
    result = _slipstream("test", "--cpu", "--num_processes", "2", "--json", "--num_cpu_threads_per_process", "1")
    assert result.returncode == 0, result.stderr
    report = json.loads(result.stdout)
    assert report["processes"] == 2
    assert report["verdict"].startswith("All")
    assert report["summary"].startswith("worked on 2 x cpu (")
    assert not any(check["failed"] for check in report["checks"])


@pytest.mark.launched
def test_impossible_job_fails_with_verdict(tmp_path: Path) -> None:
    """A job that cannot run is a failure with a verdict."""
    (tmp_path / "torch.py").write_text("raise ImportError('no torch today')")
    result = subprocess.run(
        [sys.executable, "-c", "from slipstream.cli.main import main; raise SystemExit(main())", "test", "--cpu", "--num_processes", "1"],
        capture_output=True, text=True, timeout=100, env={"PYTHONPATH": str(tmp_path), "PATH": "/usr/bin:/bin"},
    )  # fmt: skip
    assert result.returncode == 1
    assert "no torch today" in result.stderr
    assert "did not come to an end" in result.stderr
    assert result.stderr.splitlines()[-1].startswith("did not work (no outcome) on cpu, torch ")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["train.py"], "takes no script: train.py"),
        (["--cpu", "--num_processes", "2", "train.py"], "takes no script: train.py"),
        (["--module"], "--module is about a script"),
        (["--num_processes", "0"], "num_processes=0"),
        (["--numprocesses", "2"], "--numprocesses"),
    ],
)
def test_launch_errors_before_start(arguments: list[str], said: str) -> None:
    """What a job would refuse is refused before anything starts."""
    with pytest.raises(ConfigError, match=said):
        _configuration(arguments)


def test_config_error_exit_code_two() -> None:
    """A refusal is exit code two and no traceback."""
    result = _slipstream("test", "--num_processes", "none")
    assert result.returncode == 2
    assert "Traceback" not in result.stderr


def test_launch_options_passed_on() -> None:
    """Options of launch are handed on as they are."""
    line = _command_line(["--cpu", "--role", "a b"], resolve(environ={}), Path("report"))
    assert line[2:7] == ["slipstream", "launch", "--cpu", "--role", "a b"]
    assert line[-3:] == ["slipstream.testing.selfcheck", "--report", "report"]


def test_shorter_timeouts_unless_given() -> None:
    """The check is less patient than a training unless told."""
    assert "--timeout" in _command_line([], resolve(environ={}), Path("report"))
    assert "--timeout" not in _command_line([], resolve(environ={"SLIPSTREAM_TIMEOUT": "9"}), Path("report"))


def test_help_names_launch_options() -> None:
    """The help names the options of launch."""
    result = CliRunner().invoke(command, ["--help"])
    assert "slipstream launch --help" in result.output
