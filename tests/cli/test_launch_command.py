"""`slipstream` and `slipstream launch` up to the point where something would start: messages, exit codes, help, --show."""

from __future__ import annotations

import subprocess
import sys

import pytest

from slipstream.cli.main import main
from slipstream.config import OPTIONS


@pytest.fixture(autouse=True)
def _nothing_from_outside(monkeypatch, tmp_path):
    monkeypatch.setenv("SLIPSTREAM_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    (tmp_path / "list.yaml").write_text("- a\n- b\n")
    (tmp_path / "newer.yaml").write_text("version: 999\n")
    (tmp_path / "unknown.yaml").write_text("num_procs: 2\n")


TWO = "--num_machines 2 --num_processes 2"
REFUSED = {
    "unknown flag": ("launch --num_procs 2 train.py", "--num_processes"),
    "feature that is not there": ("launch --use_deepspeed train.py", "not available"),
    "no processes": ("launch --num_processes 0 train.py", "num_processes=0"),
    "not a number": ("launch --num_processes two train.py", "num_processes=two"),
    "flag without its value": ("launch --num_processes", "--num_processes"),
    "no script": ("launch --cpu", "no script"),
    "missing script": ("launch missing.py", "missing.py does not exist"),
    "folder": ("launch .", "is a folder"),
    "missing module": ("launch -m no_such_module", "no module no_such_module"),
    "missing program": ("launch --no_python no-such-program", "no-such-program"),
    "module and program": ("launch -m --no_python train", "--no_python"),
    "file that is not a mapping": ("launch --config_file list.yaml train.py", "list.yaml"),
    "file of a newer version": ("launch --config_file newer.yaml train.py", "999"),
    "unknown key": ("launch --config_file unknown.yaml train.py", "num_processes"),
    "missing file": ("launch --config_file missing.yaml train.py", "missing.yaml does not exist"),
    "contradiction": ("launch --cpu --gpu_ids 0 train.py", "contradicts"),
    "two devices": ("launch --cpu --device cuda train.py", "cpu=true (from --cpu) contradicts device=cuda (from --device)"),
    "unknown device": ("launch --device gpu train.py", "device=gpu (from --device): there is no such device family"),
    "device that is not here": ("launch --device npu train.py", "the package torch_npu is not installed"),
    "more processes than devices": ("launch --device standin --num_processes 5 train.py", "5 - 4 = 1 without one"),
    "device number that is not there": ("launch --device standin --gpu_ids 4 train.py", "has 4 devices, 0 to 3"),
    "machine rank out of range": (f"launch {TWO} --machine_rank 2 train.py", "machine_rank=2"),
    "uneven share": ("launch --num_machines 2 --num_processes 3 train.py", "num_processes=3"),
    "nowhere to meet": (f"launch {TWO} train.py", "main_process_ip"),
    "main process out of reach": (
        f"launch {TWO} --machine_rank 1 --main_process_ip no-such-host.invalid --rdzv_conf timeout=0.2 train.py",
        "has no address",
    ),
    "unknown setting": ("launch --cpu --num_processes 2 --rdzv_conf patience=2 train.py", "patience"),
    "tee of a rank that is not there": ("launch --cpu --num_processes 2 --tee 7:1 train.py", "local rank 7"),
    "unknown command": ("lunch train.py", "Did you mean launch"),
}


@pytest.mark.parametrize(("line", "says"), REFUSED.values(), ids=REFUSED.keys())
def test_bad_input_exit_code_two(line, says, capfd):
    """Bad input is a short message and exit code 2."""
    assert main(line.split()) == 2
    captured = capfd.readouterr()
    assert says in captured.err
    assert "Traceback" not in captured.err
    assert 1 <= len(captured.err.splitlines()) <= 5
    assert captured.out == ""


@pytest.mark.parametrize("variable", ["RANK", "WORLD_SIZE", "LOCAL_RANK"])
def test_half_set_rank_variables(variable, capfd, monkeypatch):
    """Rank variables that are half set are refused."""
    monkeypatch.setenv(variable, "1")
    assert main(["launch", "--cpu", "train.py"]) == 2
    assert variable in capfd.readouterr().err


def shown(line: str, capsys) -> str:
    assert main(["launch", "--show", *line.split()]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("flag", ["--num_processes 3", "--num-processes 3", "--num-processes=3"])
def test_both_flag_spellings(flag, capsys):
    """Both spellings of a flag."""
    assert "3 on this machine" in shown(f"--cpu {flag} train.py", capsys)


def test_show_origins_starts_nothing(capsys, monkeypatch, tmp_path):
    """Show starts nothing and shows origins."""
    (tmp_path / "train.py").write_text("raise SystemExit('started')")
    monkeypatch.setenv("SLIPSTREAM_MAX_RESTARTS", "2")
    (tmp_path / "config.yaml").write_text("num_processes: 2\n")
    text = shown("--cpu --config_file config.yaml train.py --its option", capsys)
    assert "2  from config.yaml: num_processes" in text
    assert "2  from SLIPSTREAM_MAX_RESTARTS" in text
    assert "true  from --cpu" in text
    assert "--its option" in text


MACHINES = "--cpu --num_processes 1024 --num_machines 128 --main_process_ip 10.0.0.1"


def test_dry_run_shows_mesh(capsys):
    """`--dry_run` of a thousand ranks shows axes, groups of this machine, and the global batch."""
    assert main(f"launch --dry-run --use_fsdp {MACHINES} --parallelism_config_dp_replicate_size 128 --machine_rank 1 train.py".split()) == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    begin = lines.index("mesh of the processes")
    assert lines[begin + 1 : begin + 8] == [
        "sizes 1024 processes = dp_replicate 128 x dp_shard 8, 8 on each of 128 machines",
        "dp_replicate 128 copies of the shards, which average their gradients; 8 groups of 128 ranks across machines",
        "of machine 1 0 8 16 ... 1016 | 1 9 17 ... 1017 | 2 10 18 ... 1018 | 3 11 19 ... 1019 | ... (8 in all)",
        "dp_shard 8 shards of one copy of the model; 128 groups of 8 ranks, each within a machine",
        "of machine 1 8-15",
        "data parallel 1024 processes read different samples: the global batch is 1024 x the batch size of a process",
        "memory `slipstream estimate MODEL --num_processes 1024 --dp_replicate_size 128` says what each process holds",
    ]


@pytest.mark.parametrize(
    ("options", "sizes"),
    [
        ("--use_fsdp", "dp_shard 1024"),
        ("--use_fsdp --fsdp_sharding_strategy HYBRID_SHARD", "dp_replicate 128 x dp_shard 8"),
        ("--parallelism_config_dp_replicate_size 2 --parallelism_config_dp_shard_size 512", "dp_replicate 2 x dp_shard 512"),
        ("", None),
    ],
)
def test_mesh_of_options(options, sizes, capsys):
    """The mesh is that of the run; without sharding there is none to show."""
    text = shown(f"{options} {MACHINES} train.py", capsys)
    assert (f"1024 processes = {sizes}, 8 on each of 128 machines" in text) if sizes else ("mesh of the processes" not in text)


def test_dry_run_without_torch():
    """A plan with a mesh imports no torch."""
    command = f"launch --dry_run --use_fsdp {MACHINES} -m timeit".split()
    code = f"import sys; from slipstream.cli.main import main; code = main({command!r}); sys.exit(code or 'torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)


def test_flags_after_script_are_scripts(capsys):
    """A flag after the script belongs to the script."""
    text = shown("--cpu train.py --num_processes 4 --show --no-such-flag", capsys)
    assert "1 on this machine" in text
    assert "--num_processes 4 --show --no-such-flag" in text


def test_negative_switch(capsys, monkeypatch):
    """No can be said to a switch."""
    monkeypatch.setenv("SLIPSTREAM_DEBUG", "yes")
    assert "debug  false  from" in shown("--no-debug train.py", capsys)


def test_help_lists_every_option(capsys):
    """Help fits a terminal and lists every option."""
    assert main(["launch", "--help"]) == 0
    text = capsys.readouterr().out
    assert max(len(line) for line in text.splitlines()) <= 80
    assert [name for name in OPTIONS if f"--{name}" not in text] == []


def test_command_help_and_version(capsys):
    """Help of the command itself and the version."""
    assert main(["--help"]) == 0
    assert main(["--version"]) == 0
    text = capsys.readouterr().out
    assert "launch" in text
    assert text.splitlines()[-1].startswith("slipstream ")


def test_help_without_torch_or_rich():
    """Help imports neither torch nor rich."""
    program = """
import sys
from slipstream.cli.main import main
main(["launch", "--help"])
print({"torch", "rich", "numpy", "yaml"} & set(sys.modules))
"""
    out = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True).stdout
    assert out.splitlines()[-1] == "set()"


@pytest.mark.parametrize(
    ("command", "ours", "everything"),
    [("--help", 15, 125), ("launch --help", 26, 160), ("launch --dry_run -m this", 32, 195), ("config --help", 20, 130), ("env", 25, 190)],
)
def test_modules_of_a_command(command, ours, everything):
    """A command imports few modules: so many of ours, and so many with the standard library and click."""
    program = f"""
import sys
before = len(sys.modules)
from slipstream.cli.main import main
main({command.split()!r})
print(sum(name.split(".")[0] == "slipstream" for name in sys.modules), len(sys.modules) - before)
"""
    out = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True).stdout
    own, total = map(int, out.splitlines()[-1].split())
    assert own <= ours
    assert total <= everything


def test_python_dash_m():
    """Python dash m is the same command."""
    found = subprocess.run([sys.executable, "-m", "slipstream", "--version"], capture_output=True, text=True, timeout=60, check=True)
    assert found.stdout.startswith("slipstream ")
