"""The commands of the drop-in beside those of Accelerate 1.15: the same options, files that each reads of the other, the same variables."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from test_config_files import ANSWERS, LATEST, MPI, V0_11

REAL = os.environ.get("REAL_ACCELERATE")
PROGRAM = Path(__file__).parent / "programs" / "describe_commands.py"

pytestmark = pytest.mark.skipif(not REAL, reason="REAL_ACCELERATE does not name a folder with Accelerate")


def describe(*words: object, real: bool) -> Any:
    environ = {name: value for name, value in os.environ.items() if not name.startswith("ACCELERATE_")}
    if real:
        environ["PYTHONPATH"] = os.pathsep.join(filter(None, [REAL, environ.get("PYTHONPATH")]))
    command = [sys.executable, str(PROGRAM), *map(str, words)]
    return json.loads(subprocess.run(command, env=environ, capture_output=True, text=True, check=True).stdout.splitlines()[-1])


DIFFERENT_OPTIONS = {
    ("--dynamo-mode --dynamo_mode", "choices"): "torch has one more mode by now",
    ("--no-tpu-cluster --no_tpu_cluster", "default"): "both switches of one value have its default",
}


def test_options():
    """Every parser has the same options, with the same destinations, defaults and choices."""
    ours, theirs = describe("parsers", real=False), describe("parsers", real=True)

    def differences(left: dict[str, Any], right: dict[str, Any]) -> list[Any]:
        found: list[Any] = sorted(set(left) ^ set(right))
        for name in set(left) & set(right):
            if name.startswith(("subcommand", "env_", "estimate_", "get_", "launch_", "merge_", "test_", "to_", "tpu_")):
                found += differences(left[name], right[name])
            else:
                found += [(name, part) for part in left[name] if left[name][part] != right[name][part]]
        return found

    assert set(differences(ours, theirs)) == set(DIFFERENT_OPTIONS)


def test_files_of_the_questionnaire(tmp_path, monkeypatch):
    """Accelerate reads what `accelerate config` of the drop-in wrote, and finds the same in it."""
    from accelerate.commands.config.config import config_command

    paths = []
    for number, (answers, _) in enumerate(ANSWERS.values()):
        left = iter(answers)
        monkeypatch.setattr("builtins.input", lambda _, left=left: next(left))
        paths.append(tmp_path / f"{number}.yaml")
        config_command(argparse.Namespace(config_file=str(paths[-1])))
    assert describe("configurations", *paths, real=True) == describe("configurations", *paths, real=False)


@pytest.mark.parametrize("text", [V0_11, LATEST, MPI.replace(", mpirun_ccl: '1'", "")])
def test_files_of_all_versions(tmp_path, text):
    """Both find the same in a file."""
    path = tmp_path / "config.yaml"
    path.write_text(text)
    ours = describe("configurations", path, real=False)[str(path)]
    theirs = describe("configurations", path, real=True)[str(path)]
    assert {name: value for name, value in ours.items() if value != {}} == {name: value for name, value in theirs.items() if value != {}}


COMMANDS = {
    "cpu": ["--cpu"],
    "precision": ["--cpu", "--mixed_precision", "bf16", "--debug", "--num_cpu_threads_per_process", "3"],
    "compiled": ["--cpu", "--dynamo_backend", "inductor", "--dynamo_mode", "max-autotune", "--dynamo_use_dynamic"],
    "two processes": ["--multi_gpu", "--num_processes", "2"],
    "sharded": ["--use_fsdp", "--num_processes", "2", "--fsdp_version", "2", "--fsdp_auto_wrap_policy", "SIZE_BASED_WRAP"],
    "sharded, version 1": [
        *("--use_fsdp", "--num_processes", "2", "--fsdp_sharding_strategy", "SHARD_GRAD_OP", "--fsdp_offload_params", "true"),
    ],
    "mesh": [
        *("--use_fsdp", "--num_processes", "2", "--fsdp_version", "2", "--use_parallelism_config"),
        *("--parallelism_config_dp_shard_size", "2"),
    ],
}
ONE_OF_TWO = {"FSDP_SHARDING_STRATEGY", "FSDP_RESHARD_AFTER_FORWARD"}
"""Two names for one setting, of which the drop-in passes on the one that was given."""


@pytest.mark.parametrize("case", COMMANDS)
def test_variables(case):
    """A worker finds each variable that Accelerate sets, with the same value; the drop-in adds some that say what holds by default."""
    ours = describe("variables", *COMMANDS[case], "train.py", real=False)
    theirs = describe("variables", *COMMANDS[case], "train.py", real=True)
    assert {name: ours.get(name) for name in theirs if name not in ONE_OF_TWO} == {
        name: value for name, value in theirs.items() if name not in ONE_OF_TWO
    }
