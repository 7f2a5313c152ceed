"""`slipstream config`: the interview, setting without asking, the minimal file and the update of older ones."""

from __future__ import annotations

import os
import pty
import select
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result
from hypothesis import given, strategies as st

from slipstream.cli.config import interview
from slipstream.cli.main import main
from slipstream.config import OPTIONS, ConfigError, resolve
from slipstream.config.option import Value
from slipstream.config.sources import read_file

ACCELERATE = """\
compute_environment: LOCAL_MACHINE
distributed_type: MULTI_CPU
downcast_bf16: 'no'
mixed_precision: 'no'
num_processes: 2
use_cpu: true
"""


@click.command(add_help_option=False, context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.argument("words", nargs=-1, type=click.UNPROCESSED)
@click.pass_context
def SLIPSTREAM(context: click.Context, words: tuple[str, ...]) -> None:
    """The whole command line, for a runner that captures its output."""
    context.exit(main(words))


def run(*arguments: str, environ: Mapping[str, str] | None = None) -> Result:
    return CliRunner().invoke(SLIPSTREAM, ["config", *arguments], env=dict(environ or {}))


def refused(*arguments: str, environ: Mapping[str, str] | None = None) -> str:
    result = run(*arguments, environ=environ)
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    assert "Traceback" not in result.stderr
    assert len(result.stderr.splitlines()) <= 4
    return result.stderr


def answering(**given_answers: str) -> tuple[Callable[[str, str, Callable[[str], Value]], Value], list[str]]:
    """Somebody who answers some questions by option, keeps the rest, and remembers what was asked."""
    asked: list[str] = []

    def ask(question: str, default: str, reader: Callable[[str], Value]) -> Value:
        name = next(option.name for option in OPTIONS.values() if option.question and question.startswith(option.question))
        asked.append(name)
        return reader(given_answers.get(name, default))

    return ask, asked


def test_set_writes_without_asking(tmp_path: Path) -> None:
    """Set writes a file without asking."""
    path = tmp_path / "c.yaml"
    result = run("--set", "num_processes=4", "--set", "mixed-precision=bf16", "--config_file", str(path))
    assert result.exit_code == 0, result.output
    assert read_file(path) == {"version": 1, "num_processes": 4, "mixed_precision": "bf16"}
    assert f"Wrote {path}." in result.stdout


def test_set_keeps_and_removes(tmp_path: Path) -> None:
    """Set keeps what the file has and takes out what is empty."""
    path = tmp_path / "c.yaml"
    run("--set", "num_processes=4", "--set", "debug=yes", "--config-file", str(path))
    run("--set", "num_processes=", "--set", "timeout=60", "--config-file", str(path))
    assert read_file(path) == {"version": 1, "debug": True, "timeout": 60.0}


def test_default_path_is_launchers(tmp_path: Path) -> None:
    """The default place is that of the launcher."""
    environ = {"SLIPSTREAM_HOME": str(tmp_path / "home")}
    assert "reads it by itself" in run("--set", "debug=1", environ=environ).stdout
    assert resolve(environ=environ, default_file=True).safety.debug is True
    named = tmp_path / "named.yaml"
    run("--set", "debug=1", environ={**environ, "SLIPSTREAM_CONFIG_FILE": str(named)})
    assert named.exists()


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        (["num_procs=2"], "Did you mean num_processes?"),
        (["num_processes=zero"], "num_processes=zero (from --set) is not a whole number"),
        (["num_processes=0"], "is less than 1"),
        (["num_processes"], "has no = in it"),
        (["cpu=1", "gpu_ids=0,1"], "gpu_ids=0,1 (from --set) contradicts cpu=true (from --set)"),
        (["cpu=1", "cpu=0"], "is given twice"),
        (["device=gpu"], "device=gpu (from --set): there is no such device family"),
        (["quiet=1"], "belongs to one command line"),
        (["zero_stage=2"], "not available in this version"),
    ],
)
def test_bad_setting_writes_nothing(settings: list[str], why: str, tmp_path: Path) -> None:
    """A bad setting is refused and nothing is written."""
    path = tmp_path / "c.yaml"
    assert why in refused(*(part for setting in settings for part in ("--set", setting)), "--config_file", str(path))
    assert not path.exists()


def test_interview_needs_terminal(tmp_path: Path) -> None:
    """Without a terminal the interview is refused."""
    assert "no terminal to ask on" in refused("--config_file", str(tmp_path / "c.yaml"))


def test_default_minimal_no_overwrite(tmp_path: Path) -> None:
    """Default writes a minimal file and refuses to overwrite."""
    path = tmp_path / "c.yaml"
    assert run("default", "--config_file", str(path), "--mixed_precision", "bf16").exit_code == 0
    assert read_file(path) == {"version": 1, "mixed_precision": "bf16"}
    assert "exists already" in refused("default", "--config_file", str(path))
    assert run("default", "--config_file", str(path), "--overwrite").exit_code == 0
    assert read_file(path) == {"version": 1, "mixed_precision": "no"}
    assert "is not one of the choices" in refused("default", "--config_file", str(path), "--mixed_precision", "fp64", "--overwrite")


@pytest.mark.parametrize("arguments", [["default"], ["--set", "debug=yes"]])
def test_path_announced_first(tmp_path: Path, arguments: list[str]) -> None:
    """The first line names the file, and how to choose another."""
    path = tmp_path / "c.yaml"
    first, *rest = run(*arguments, *(["--config_file", str(path)])).stdout.splitlines()
    assert first == f"This writes {path} (--config_file FILE chooses another place)."
    assert rest[0] == f"Wrote {path}."


def test_file_before_subcommand(tmp_path: Path) -> None:
    """The file may be named before the subcommand."""
    assert run("--config_file", str(tmp_path / "c.yaml"), "default").exit_code == 0
    assert (tmp_path / "c.yaml").exists()
    assert "--set does not go with" in refused("--set", "debug=1", "default", "--config_file", str(tmp_path / "d.yaml"))


def test_update_converts_and_backs_up(tmp_path: Path) -> None:
    """Update makes a foreign file ours says what it dropped and keeps the old one."""
    path = tmp_path / "default_config.yaml"
    path.write_text(ACCELERATE)
    before = resolve(config_file=path, environ={})
    result = run("update", "--config_file", str(path))
    assert result.exit_code == 0, result.output
    assert "dropped downcast_bf16: asks for nothing" in result.stdout
    assert read_file(path) == {"version": 1, "cpu": True, "num_processes": 2, "mixed_precision": "no"}
    assert (tmp_path / "default_config.yaml.bak").read_text() == ACCELERATE
    after = resolve(config_file=path, environ={})
    assert {name: after.value(name) for name in OPTIONS} == {name: before.value(name) for name in OPTIONS}


def test_update_current_file_unchanged(tmp_path: Path) -> None:
    """Update leaves a file of today alone."""
    path = tmp_path / "c.yaml"
    run("default", "--config_file", str(path))
    assert "is up to date" in run("update", "--config_file", str(path)).stdout
    assert os.listdir(tmp_path) == ["c.yaml"]


def test_update_refuses_unreadable(tmp_path: Path) -> None:
    """Update refuses what cannot be read and changes nothing."""
    path = tmp_path / "c.yaml"
    assert "does not exist" in refused("update", "--config_file", str(path))
    path.write_text(ACCELERATE + "parallelism_config:\n  parallelism_config_tp_size: 2\n")
    assert "asks for tensor parallelism, which is not available yet" in refused("update", "--config_file", str(path))
    path.write_text(ACCELERATE + "machine_rank: 3\n")
    assert "contradicts" in refused("update", "--config_file", str(path))
    assert os.listdir(tmp_path) == ["c.yaml"]


def test_foreign_file_not_changed(tmp_path: Path) -> None:
    """A foreign file is not changed by other commands."""
    path = tmp_path / "default_config.yaml"
    path.write_text(ACCELERATE)
    assert "slipstream config update" in refused("--set", "debug=1", "--config_file", str(path))
    assert path.read_text() == ACCELERATE


def test_unknown_flag() -> None:
    """An unknown flag is a usage error."""
    result = run("--sett", "a=1")
    assert result.exit_code == 2
    assert "--set" in result.stderr


def test_interview_asks_relevant() -> None:
    """The interview asks only what matters."""
    ask, asked = answering(cpu="yes")
    interview(ask, {})
    assert not {"machine_rank", "main_process_ip", "rdzv_backend", "gpu_ids", "dynamo_mode"} & set(asked)
    ask, asked = answering(num_machines="2", same_network="no", dynamo_backend="inductor")
    interview(ask, {})
    assert {"machine_rank", "main_process_ip", "rdzv_backend", "rdzv_conf", "gpu_ids", "dynamo_mode"} <= set(asked)


def test_interview_defaults() -> None:
    """Keeping every default gives the default configuration."""
    ask, _ = answering()
    answers = interview(ask, {})
    assert {name: value for name, value in answers.items() if value != OPTIONS[name].default} == {}


def test_interview_sharding() -> None:
    """Sharding is asked about where it can be, its details where it was chosen, and the answers make a file."""
    ask, asked = answering(num_processes="1")
    interview(ask, {})
    assert "use_fsdp" not in asked
    ask, asked = answering()
    interview(ask, {})
    assert "use_fsdp" in asked
    assert not [name for name in asked if name.startswith(("fsdp_", "parallelism_"))]
    blocks = {"fsdp_auto_wrap_policy": "transformer_based_wrap", "fsdp_transformer_layer_cls_to_wrap": "Block"}
    ask, asked = answering(num_processes="4", use_fsdp="yes", parallelism_config_dp_replicate_size="2", fsdp_offload_params="yes", **blocks)
    config = resolve(flags=interview(ask, {}), environ={})
    assert "fsdp_min_num_params" not in asked
    assert "fsdp_activation_checkpointing_offload" not in asked
    assert (config.sharding.use_fsdp, config.sharding.fsdp_offload_params, config.sharding.fsdp_transformer_layer_cls_to_wrap) == (
        True, True, "Block",
    )  # fmt: skip
    assert config.parallelism.parallelism_config_dp_replicate_size == 2


def test_interview_starts_from_file() -> None:
    """The interview starts from the file and drops what no longer matters."""
    existing: dict[str, Value] = {"num_machines": 2, "machine_rank": 1, "timeout": 60.0, "mixed_precision": "bf16"}
    ask, _ = answering(num_machines="1")
    answers = interview(ask, existing)
    assert (answers["mixed_precision"], answers["timeout"], answers["num_machines"]) == ("bf16", 60.0, 1)
    assert "machine_rank" not in answers


def test_interview_unsets() -> None:
    """The interview can unset what the file sets."""
    ask, _ = answering(num_processes="auto")
    assert interview(ask, {"num_processes": 4})["num_processes"] is None


@pytest.mark.parametrize(
    ("answers", "why"),
    [
        ({"num_processes": "zero"}, "num_processes=zero (from your answer) is not a whole number"),
        ({"num_machines": "2", "machine_rank": "2"}, "machine_rank=2 (from your answer) contradicts num_machines=2 (from your answer)"),
        ({"num_machines": "2", "num_processes": "3"}, "cannot be shared out evenly"),
    ],
)
def test_bad_answer_refused(answers: dict[str, str], why: str) -> None:
    """An answer that cannot be is refused at once."""
    ask, asked = answering(**answers)
    with pytest.raises(ConfigError) as caught:
        interview(ask, {})
    assert why in str(caught.value)
    assert asked[-1] == list(answers)[-1]


@given(st.data())
def test_accepted_answers_make_valid_file(data: st.DataObject) -> None:
    """Answers that are accepted make a file that is accepted."""
    def ask(question: str, default: str, reader: Callable[[str], Value]) -> Value:
        answer = data.draw(st.sampled_from([default, "1", "2", "4", "yes", "no", "0,1", "bf16", "inductor", "node0"]))
        try:
            return reader(answer)
        except ConfigError:
            return reader(default)

    values = interview(ask, {})
    config = resolve(flags=values, environ={})
    assert {name: config.value(name) for name, value in values.items() if value is not None} == {
        name: value for name, value in values.items() if value is not None
    }


def test_interview_on_terminal(tmp_path: Path) -> None:
    """A wrong answer is explained and asked again; Enter keeps the defaults; the file holds the answers."""
    path = tmp_path / "c.yaml"
    controller, terminal = pty.openpty()
    code = "from slipstream.cli.config import command; command()"
    process = subprocess.Popen(
        [sys.executable, "-c", code, "--config_file", str(path)], stdin=terminal, stdout=terminal, stderr=terminal, close_fds=True
    )
    os.close(terminal)
    answers = {"CPU only": ["yes"], "processes in total": ["none at all", "2"], "number format": ["bf16"]}
    shown, pending, end = "", "", time.monotonic() + 60
    try:
        while time.monotonic() < end:
            if not select.select([controller], [], [], 1)[0]:
                continue
            try:
                text = os.read(controller, 4096).decode()
            except OSError:  # the other side has closed the terminal
                break
            if not text:
                break
            shown, pending = shown + text, pending + text
            if pending.rstrip(" ").endswith("]:"):
                waiting = next((words for topic, words in answers.items() if topic in pending.splitlines()[-1] and words), None)
                os.write(controller, (waiting.pop(0) if waiting else "").encode() + b"\n")
                pending = ""
        assert process.wait(30) == 0, shown
    finally:
        process.kill()
        process.wait()
        os.close(controller)
    assert "is not a whole number" in shown
    assert not any(answers.values())
    read = read_file(path)
    assert (read["cpu"], read["num_processes"], read["mixed_precision"], read["num_machines"]) == (True, 2, "bf16", 1)
