"""The command `accelerate`: its subcommands and options, what reaches the workers, and what is refused or named as without effect."""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import yaml
from accelerate.commands import launch as launch_module
from accelerate.commands.accelerate_cli import get_parser
from accelerate.commands.launch import _prepare, launch_command, launch_command_parser

from slipstream.errors import ConfigError, LaunchError

OPTIONS = {
    "config": "--config_file",
    "config default": "--config_file --mixed_precision",
    "config update": "--config_file",
    "env": "--config_file",
    "estimate-memory": "model_name --library_name --dtypes --trust_remote_code",
    "merge-weights": "checkpoint_directory output_path --unsafe_serialization --remove_checkpoint_dir",
    "test": "--config_file",
    "to-fsdp2": "--config_file --overwrite --output_file",
    "tpu-config": """--config_file --tpu_name --tpu_zone --use_alpha --command_file --command --install_accelerate --accelerate_version
        --debug""",
    "launch": """--config_file --quiet --cpu --multi_gpu --tpu --mixed_precision --num_processes --num_machines
        --num_cpu_threads_per_process --enable_cpu_affinity --dynamo_backend --dynamo_mode --dynamo_use_fullgraph --dynamo_use_dynamic
        --dynamo_use_regional_compilation --use_deepspeed --use_fsdp --use_parallelism_config --use_megatron_lm --gpu_ids
        --same_network --machine_rank --main_process_ip --main_process_port --tee --log_dir --role --rdzv_backend --rdzv_conf
        --max_restarts --monitor_interval --module --no_python --tpu_cluster --no_tpu_cluster --tpu_use_sudo --vm --env
        --main_training_function --downcast_bf16 --deepspeed_config_file --zero_stage --offload_optimizer_device
        --offload_param_device --offload_optimizer_nvme_path --offload_param_nvme_path --gradient_accumulation_steps
        --gradient_clipping --zero3_init_flag --zero3_save_16bit_model --deepspeed_hostfile --deepspeed_exclusion_filter
        --deepspeed_inclusion_filter --deepspeed_multinode_launcher --deepspeed_moe_layer_cls_names --fsdp_version
        --fsdp_offload_params --fsdp_min_num_params --fsdp_sharding_strategy --fsdp_reshard_after_forward --fsdp_auto_wrap_policy
        --fsdp_transformer_layer_cls_to_wrap --fsdp_backward_prefetch --fsdp_state_dict_type --fsdp_forward_prefetch
        --fsdp_use_orig_params --fsdp_cpu_ram_efficient_loading --fsdp_sync_module_states --fsdp_activation_checkpointing
        --fsdp_activation_checkpointing_offload --megatron_lm_tp_degree --megatron_lm_use_custom_fsdp --megatron_lm_no_load_optim
        --megatron_lm_eod_mask_loss --megatron_lm_overlap_cpu_optimizer_d2h_h2d --megatron_lm_no_save_optim
        --megatron_lm_optimizer_cpu_offload --megatron_lm_use_precision_aware_optimizer
        --megatron_lm_decoder_last_pipeline_num_layers --megatron_lm_pp_degree --megatron_lm_num_micro_batches
        --megatron_lm_sequence_parallelism --megatron_lm_recompute_activations --megatron_lm_use_distributed_optimizer
        --megatron_lm_gradient_clipping --megatron_lm_recompute_granularity --megatron_lm_recompute_method
        --megatron_lm_recompute_num_layers --megatron_lm_attention_backend --megatron_lm_expert_model_parallel_size
        --megatron_lm_context_parallel_size --megatron_lm_attention_dropout --megatron_lm_hidden_dropout
        --megatron_lm_attention_softmax_in_fp32 --megatron_lm_expert_tensor_parallel_size --megatron_lm_calculate_per_token_loss
        --megatron_lm_use_rotary_position_embeddings --fp8_backend --fp8_use_autocast_during_eval --fp8_margin --fp8_interval
        --fp8_format --fp8_amax_history_len --fp8_amax_compute_algo --fp8_override_linear_precision --fp8_opt_level
        --fp8_enable_fsdp_float8_all_gather --fp8_pad_inner_dim --aws_access_key_id --aws_secret_access_key --debug training_script
        --mpirun_hostfile --parallelism_config_dp_replicate_size --parallelism_config_dp_shard_size --parallelism_config_tp_size
        --parallelism_config_cp_size --parallelism_config_cp_backend --parallelism_config_cp_comm_strategy
        --parallelism_config_sp_size --parallelism_config_sp_backend --parallelism_config_sp_seq_length
        --parallelism_config_sp_seq_length_is_variable --parallelism_config_sp_attn_implementation training_script_args""",
}
"""Every subcommand of Accelerate 1.15 with its options."""

VALUES = {
    "config_file": "FILE", "gpu_ids": "0", "tee": "3", "rdzv_conf": "timeout=9", "fsdp_sharding_strategy": "SHARD_GRAD_OP",
    "fsdp_auto_wrap_policy": "SIZE_BASED_WRAP", "fsdp_backward_prefetch": "BACKWARD_PRE", "fsdp_state_dict_type": "FULL_STATE_DICT",
    "fp8_override_linear_precision": "true,false,false", "rdzv_backend": "c10d", "fp8_backend": "te", "num_processes": "3",
    "machine_rank": "1", "mixed_precision": "bf16",
}  # fmt: skip
"""What an option is given where a value of its type is not enough."""
TOGETHER = {
    "fsdp_": ["--use_fsdp"], "dynamo_": ["--dynamo_backend", "inductor"], "fp8_": ["--mixed_precision", "fp8"],
    "parallelism_config_": ["--use_parallelism_config", "--use_fsdp", "--fsdp_version", "2"],
    "use_parallelism_config": ["--use_fsdp", "--fsdp_version", "2"], "main_process_": ["--num_machines", "1"],
}  # fmt: skip
"""What options of a family need beside them."""


def parser_of(command: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = get_parser()
    for word in command.split():
        (choices,) = (action.choices for action in parser._actions if isinstance(action, argparse._SubParsersAction))
        parser = choices[word]
    return parser


@pytest.mark.parametrize("command", OPTIONS)
def test_every_option_is_there(command):
    """A subcommand has all options of Accelerate, and no others."""
    actions = [action for action in parser_of(command)._actions if not isinstance(action, argparse._SubParsersAction)]
    found = {name for action in actions for name in (action.option_strings or [action.dest]) if "-" not in name[2:] and name != "-h"}
    short = {"-q", "-m", "-t"}
    assert found - short - {"--help"} == set(OPTIONS[command].split())


def test_dashes_and_underscores():
    """Long options of `launch` can be written in both ways, and what was typed is known."""
    args = launch_command_parser().parse_args(["--num-processes", "2", "--mixed_precision=bf16", "train.py", "--lr", "0.1"])
    assert (args.num_processes, args.mixed_precision, args.training_script_args) == (2, "bf16", ["--lr", "0.1"])
    assert {"num_processes", "mixed_precision"} <= args.nondefault


@pytest.fixture(scope="module")
def script(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("script") / "train.py"
    path.write_text("import os, json\nprint(json.dumps(dict(os.environ)))\n")
    path.with_name("two.yaml").write_text("{distributed_type: MULTI_CPU, num_processes: 2, mixed_precision: bf16}")
    return str(path)


def outcome(words: list[str]) -> tuple[str, str, str]:
    """Return what would be started, the error, and what is said, for these words of a command line."""
    with contextlib.redirect_stderr(io.StringIO()) as said, warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        try:
            args, plan = _prepare(launch_command_parser().parse_args(words))
        except (ConfigError, SystemExit) as error:
            return "", str(error), said.getvalue()
    started = "mpirun" if plan is None else json.dumps(plan.to_json(), sort_keys=True, default=str)
    return started, "", said.getvalue() + "".join(str(warning.message) for warning in warned)


def words_of(action: argparse.Action, script: str) -> list[str]:
    name = next(name for name in action.option_strings if name.startswith("--"))
    if action.nargs == 0:
        return [name]
    if action.dest in VALUES:
        value = VALUES[action.dest].replace("FILE", str(Path(script).with_name("two.yaml")))
    elif action.choices:
        value = [str(choice) for choice in action.choices if choice != action.default or len(action.choices) == 1][-1]
    elif action.type in (int, float):
        value = "2"
    else:
        value = "false" if str(action.default).lower() == "true" else "true"
    return [name, value]


LAUNCH_OPTIONS = sorted(name[2:] for name in OPTIONS["launch"].split() if name.startswith("--") and name != "--no_tpu_cluster")


@pytest.mark.parametrize("name", LAUNCH_OPTIONS)
def test_no_option_of_launch_is_ignored(name, script):
    """Each option changes what is started, or is refused, or is named as without effect; with the engine that it is for, and without."""
    parser = launch_command_parser()
    (action,) = (action for action in parser._actions if f"--{name}" in action.option_strings)
    for beside in ([], next((words for start, words in TOGETHER.items() if name.startswith(start)), [])):
        before = outcome(["--num_processes", "2", *beside, script])
        assert not before[1]
        started, refused, said = outcome(["--num_processes", "2", *beside, *words_of(action, script), script])
        if refused:
            assert any(word in refused for word in (name, name.partition("_")[2], "DeepSpeed", "TPUs", "module", "program", "machines"))
        else:
            assert started != before[0] or f"--{name} has no effect" in said


def test_no_tpu_cluster_is_the_default(script):
    """The switch that turns TPU pods off changes nothing, because they are off."""
    assert outcome([script]) == outcome(["--no_tpu_cluster", script])


def test_variables_that_scripts_read(script, tmp_path):
    """A worker finds the variables of Accelerate: those of precision, compilation, sharding and the mesh."""
    config = tmp_path / "fsdp.yaml"
    config.write_text(
        yaml.safe_dump(
            {
                "compute_environment": "LOCAL_MACHINE",
                "distributed_type": "FSDP",
                "mixed_precision": "bf16",
                "num_processes": 1,
                "fsdp_config": {"fsdp_version": 2, "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "fsdp_offload_params": False},
                "dynamo_config": {"dynamo_backend": "INDUCTOR", "dynamo_mode": "max-autotune"},
                "debug": True,
            }
        )
    )
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(config), "--cpu", "--use_fsdp"]
    command += ["--gradient_accumulation_steps", "3", "--num_cpu_threads_per_process", "2", script]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = json.loads(shown.splitlines()[-1])
    expected = {
        "ACCELERATE_MIXED_PRECISION": "bf16",
        "ACCELERATE_USE_FSDP": "true",
        "ACCELERATE_USE_CPU": "True",
        "ACCELERATE_DEBUG_MODE": "true",
        "ACCELERATE_DYNAMO_BACKEND": "INDUCTOR",
        "ACCELERATE_DYNAMO_MODE": "max-autotune",
        "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "3",
        "FSDP_VERSION": "2",
        "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
        "FSDP_OFFLOAD_PARAMS": "false",
        "FSDP_CPU_RAM_EFFICIENT_LOADING": "true",
        "OMP_NUM_THREADS": "2",
    }
    assert {name: found.get(name) for name in expected} == expected


@pytest.mark.parametrize("sharded", [False, True])
def test_ranks_of_one_process(script, sharded):
    """One process has ranks in its environment only if an engine for several was chosen; those of a job around it are gone."""
    options = ["--use_fsdp", "--num_processes", "1"] if sharded else []
    command = [sys.executable, "-m", "accelerate.commands.launch", "--cpu", *options, script]
    environ = {**os.environ, "RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "3", "MASTER_ADDR": "elsewhere", "MASTER_PORT": "1"}
    found = json.loads(subprocess.run(command, capture_output=True, text=True, check=True, env=environ).stdout.splitlines()[-1])
    assert [found.get(name) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")] == (["0", "1", "0"] if sharded else [None] * 3)
    assert found.get("MASTER_ADDR") == ("127.0.0.1" if sharded else None)


@pytest.mark.parametrize("num_processes", [1, 2])
def test_launch_command_returns(num_processes, tmp_path):
    """`launch_command`, which trl calls, waits for the job and comes back; a failure raises with the report."""
    good, bad = tmp_path / "good.py", tmp_path / "bad.py"
    good.write_text("from accelerate import PartialState\nimport pathlib\nstate = PartialState()\n"
                    "pathlib.Path(__file__).with_name(f'{state.process_index}').touch()\n")  # fmt: skip
    bad.write_text("raise ValueError('of the script')\n")
    parser = launch_command_parser()
    launch_command(parser.parse_args(["--cpu", "--num_processes", str(num_processes), str(good)]))
    assert sorted(path.name for path in tmp_path.iterdir() if path.suffix == "") == [str(rank) for rank in range(num_processes)]
    with pytest.raises((LaunchError, subprocess.CalledProcessError)):
        launch_command(parser.parse_args(["--cpu", "--num_processes", str(num_processes), str(bad)]))


def test_wrong_input_is_a_message(accelerate_command):
    """The console command ends with exit code 2 and one message, without a traceback."""
    ended = subprocess.run([accelerate_command, "launch", "--use_deepspeed", __file__], capture_output=True, text=True)
    assert ended.returncode == 2
    assert "DeepSpeed does not run on Slipstream" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_failures_of_commands_are_messages(accelerate_command, tmp_path):
    """A model that is not there, a questionnaire without answers and a check that fails end without a traceback."""
    (tmp_path / "bad.yaml").write_text("mixed_precison: bf16\n")
    cases = [
        (["estimate-memory", str(tmp_path)], 2, "estimate-memory"),
        (["config", "--config_file", str(tmp_path / "new.yaml")], 2, "accelerate config default"),
        (["test", "--config_file", str(tmp_path / "bad.yaml")], 1, "the check failed"),
    ]
    for words, code, text in cases:
        ended = subprocess.run([accelerate_command, *words], capture_output=True, text=True, stdin=subprocess.DEVNULL)
        assert (ended.returncode, text in ended.stderr, "Traceback" in ended.stderr) == (code, True, False), ended.stderr
    assert not (tmp_path / "new.yaml").exists()


def test_a_hub_out_of_reach_is_told_from_a_missing_model(monkeypatch):
    """The client of the hub raises errors of its HTTP package, which are no OSErrors."""
    hub = pytest.importorskip("huggingface_hub")
    from accelerate.commands.estimate import verify_on_hub
    from huggingface_hub.errors import HfHubHTTPError

    base = next(kind for kind in HfHubHTTPError.__mro__ if kind.__name__ == "HTTPError")

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise base("no route")

    monkeypatch.setattr(hub, "model_info", refuse)
    assert verify_on_hub("some/model") == "gated"


def test_help_imports_no_torch():
    """Parsing a command line costs no import of torch."""
    code = "import sys; from accelerate.commands.accelerate_cli import get_parser; get_parser(); sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_env_describes_the_installation(capsys):
    """`accelerate env` says whose Accelerate this is."""
    from accelerate.commands.env import env_command, env_command_parser

    info = env_command(env_command_parser().parse_args([]))
    assert info["`Accelerate` version"] == "1.15.0+slipstream"
    assert "Slipstream" in capsys.readouterr().out


@pytest.mark.filterwarnings("ignore")
def test_estimate_memory_of_a_local_model(tmp_path, capsys):
    """`accelerate estimate-memory` shows the sizes of a model that is described in a folder, in every dtype that is asked for."""
    from accelerate.commands.estimate import estimate_command_parser, gather_data

    shape = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "num_hidden_layers": 2, "vocab_size": 100}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bert", "architectures": ["BertModel"], **shape}))
    args = estimate_command_parser().parse_args([str(tmp_path), "--library_name", "transformers", "--dtypes", "float32", "int4"])
    rows: list[list[Any]] = gather_data(args)
    assert [row[0] for row in rows] == ["float32", "int4"]
    assert rows[0][2] == pytest.approx(8 * rows[1][2])


CUSTOM_MODEL = """
import torch
from transformers import PretrainedConfig, PreTrainedModel

class OwnConfig(PretrainedConfig):
    model_type = "own"

class OwnModel(PreTrainedModel):
    config_class = OwnConfig
    def __init__(self, config):
        super().__init__(config)
        self.layer = torch.nn.Linear(10, 10, bias=False)
        self.post_init()
"""


@pytest.mark.filterwarnings("ignore")
def test_estimate_memory_runs_code_only_if_told(tmp_path, monkeypatch):
    """Code that comes with a model runs with `--trust_remote_code` alone."""
    from accelerate.commands.estimate import estimate_command_parser, gather_data

    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr("builtins.input", lambda _: "n")
    (tmp_path / "own_model.py").write_text(CUSTOM_MODEL)
    shape = {"model_type": "own", "architectures": ["OwnModel"]}
    homes = {"AutoConfig": "own_model.OwnConfig", "AutoModel": "own_model.OwnModel"}
    (tmp_path / "config.json").write_text(json.dumps({**shape, "auto_map": homes}))
    words = [str(tmp_path), "--dtypes", "float32"]
    with pytest.raises(ValueError, match="trust_remote_code"):
        gather_data(estimate_command_parser().parse_args(words))
    (row,) = gather_data(estimate_command_parser().parse_args([*words, "--trust_remote_code"]))
    assert row[2] == 400


def test_tpu_config_reads_files(tmp_path, capsys):
    """The pod and the commands come from files where they are not given."""
    from accelerate.commands.tpu import tpu_command_launcher, tpu_command_parser

    (tmp_path / "config.yaml").write_text("{distributed_type: 'NO', tpu_name: pod, tpu_zone: here, commands: [ls]}")
    (tmp_path / "commands.sh").write_text("echo 1\necho 2\n")
    words = ["--config_file", str(tmp_path / "config.yaml"), "--debug"]
    tpu_command_launcher(tpu_command_parser().parse_args(words))
    assert "ssh pod --zone here --command cd /usr/share; ls --worker all" in capsys.readouterr().out
    tpu_command_launcher(tpu_command_parser().parse_args([*words, "--command_file", str(tmp_path / "commands.sh"), "--tpu_name", "other"]))
    assert "ssh other --zone here --command cd /usr/share; echo 1; echo 2 --worker all" in capsys.readouterr().out


def test_env_shows_a_file(tmp_path, capsys):
    """`accelerate env --config_file` shows that file, and `accelerate config default` writes one."""
    path = str(tmp_path / "config.yaml")
    args = get_parser().parse_args(["config", "default", "--config_file", path, "--mixed_precision", "bf16"])
    args.func(args)
    args = get_parser().parse_args(["env", "--config_file", path])
    args.func(args)
    assert "- mixed_precision: bf16" in capsys.readouterr().out


def test_tpu_config_shows_its_command(capsys):
    """`accelerate tpu-config --debug` prints what gcloud would run, and runs nothing."""
    from accelerate.commands.tpu import tpu_command_launcher, tpu_command_parser

    words = ["--tpu_name", "pod", "--tpu_zone", "here", "--command", "echo", "1", "--command", "ls", "--debug", "--use_alpha"]
    tpu_command_launcher(tpu_command_parser().parse_args([*words, "--install_accelerate", "--accelerate_version", "1.2.0"]))
    shown = capsys.readouterr().out
    assert "gcloud alpha compute tpus tpu-vm ssh pod --zone here" in shown
    assert "pip install accelerate==1.2.0; echo 1; ls --worker all" in shown
    with pytest.raises(ConfigError, match="which pod"):
        tpu_command_launcher(tpu_command_parser().parse_args(["--command", "ls"]))


def test_merge_weights(launch, tmp_path):
    """`accelerate merge-weights` makes one file of the shards of two processes, and deletes them only if told to."""
    from accelerate.commands.merge import merge_command, merge_command_parser

    launch(
        f"""
        import torch
        from accelerate import Accelerator, FullyShardedDataParallelPlugin
        plugin = FullyShardedDataParallelPlugin(fsdp_version=2, state_dict_type="SHARDED_STATE_DICT")
        accelerator = Accelerator(fsdp_plugin=plugin)
        model = torch.nn.Linear(4, 4)
        with torch.no_grad():
            model.weight.copy_(torch.arange(16.0).view(4, 4))
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        accelerator.save_state({str(tmp_path / "state")!r})
        """,
        2,
        options=("--use_fsdp", "--fsdp_version", "2"),
        environ={"ACCELERATE_CHECKPOINT_FORMAT": "accelerate"},
    )
    folder = tmp_path / "state" / "pytorch_model_fsdp_0"
    assert folder.is_dir()
    merge_command(merge_command_parser().parse_args([str(folder), str(tmp_path / "merged")]))
    from safetensors.torch import load_file

    assert load_file(tmp_path / "merged" / "model.safetensors")["weight"].flatten().tolist() == list(range(16))
    assert folder.is_dir()
    words = [str(folder), str(tmp_path / "bin"), "--unsafe_serialization", "--remove_checkpoint_dir"]
    merge_command(merge_command_parser().parse_args(words))
    assert (tmp_path / "bin" / "pytorch_model.bin").exists()
    assert not folder.exists()


def test_names_of_the_module():
    """The functions that programs import from `accelerate.commands.launch` are there, or say what does not run."""
    for name in ("deepspeed_launcher", "tpu_launcher", "tpu_pod_launcher"):
        with pytest.raises(ConfigError):
            getattr(launch_module, name)(argparse.Namespace())
    with pytest.raises(ConfigError, match="SageMaker"):
        launch_module.sagemaker_launcher(None, argparse.Namespace())  # type: ignore[arg-type]
