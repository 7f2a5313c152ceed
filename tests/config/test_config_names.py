"""Names that are not options: each error says where the name stood, and what was probably meant or is not there yet."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from slipstream.config import OPTIONS, ConfigError, missing_feature, resolve, unknown_flag
from slipstream.config.names import FEATURES, nearest


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("num_procs", "--num_processes"),
        ("nproc_per_node", "--num_processes"),
        ("numprocesses", "--num_processes"),
        ("mixed_precison", "--mixed_precision"),
        ("timeuot", "--timeout"),
        ("no_cqu", "--no_cpu"),
        ("main_ip", "--main_process_ip"),
    ],
)
def test_misspelt_flag(typed: str, meant: str) -> None:
    """A misspelt flag gets the right one."""
    with pytest.raises(ConfigError) as caught:
        resolve(flags={typed: "1"}, environ={})
    first, hint = str(caught.value).splitlines()
    assert first == f"--{typed} is not an option of Slipstream."
    assert hint.startswith("Did you mean")
    assert meant in hint


def test_misspelt_variable() -> None:
    """A misspelt variable gets the right one."""
    with pytest.raises(ConfigError) as caught:
        resolve(environ={"SLIPSTREAM_TIME_OUT": "5"})
    assert str(caught.value).splitlines()[0] == "SLIPSTREAM_TIME_OUT is not an option of Slipstream."
    assert "Did you mean SLIPSTREAM_TIMEOUT" in str(caught.value)


def test_misspelt_key(tmp_path: Path) -> None:
    """A misspelt key gets the right one and its file."""
    path = tmp_path / "c.yaml"
    path.write_text("version: 1\nnum_procesess: 2\n")
    with pytest.raises(ConfigError) as caught:
        resolve(config_file=path, environ={})
    assert str(caught.value).splitlines() == [
        f"The key num_procesess (in {path}) is not an option of Slipstream.",
        "Did you mean num_processes?",
    ]


def test_unknown_name_points_to_help() -> None:
    """A name that resembles nothing says where the options are listed."""
    assert str(unknown_flag("--xylophone")).endswith("`slipstream launch --help` lists the options.")


def test_unknown_value_never_shown(tmp_path: Path) -> None:
    """The value given to an unknown name is never shown."""
    path = tmp_path / "c.yaml"
    path.write_text("api_token: hunter2\n")
    for use in (
        lambda: resolve(flags={"api_token": "hunter2"}, environ={}),
        lambda: resolve(environ={"SLIPSTREAM_API_TOKEN": "hunter2"}),
        lambda: resolve(config_file=path, environ={}),
        lambda: resolve(flags={"aws_secret_access_key": "hunter2"}, environ={}),
    ):
        with pytest.raises(ConfigError) as caught:
            use()
        assert "hunter2" not in str(caught.value)
    assert "hunter2" not in str(unknown_flag("--api_token=hunter2"))


@pytest.mark.parametrize(
    ("name", "title"),
    [
        ("use_deepspeed", "DeepSpeed"),
        ("zero_stage", "DeepSpeed"),
        ("offload_param_device", "DeepSpeed"),
        ("gradient_clipping", "DeepSpeed"),
        ("megatron_lm_tp_degree", "Megatron-LM"),
        ("parallelism_config_cp_backend", "context"),
        ("parallelism_config_sp_seq_length_is_variable", "sequence"),
        ("fp8_margin", "TransformerEngine"),
        ("tpu", "TPU"),
        ("tpu_use_sudo", "TPU"),
        ("downcast_bf16", "TPU"),
        ("mpirun_hostfile", "mpirun"),
        ("enable_cpu_affinity", "CPU cores"),
        ("aws_access_key_id", "SageMaker"),
    ],
)
def test_missing_feature_every_source(name: str, title: str, tmp_path: Path) -> None:
    """A feature that is not there is an error in every source."""
    path = tmp_path / "c.yaml"
    path.write_text(f"version: 1\n{name}: 1\n")
    for use, shown in (
        (lambda: resolve(flags={name: "1"}, environ={}), f"--{name}"),
        (lambda: resolve(environ={f"SLIPSTREAM_{name.upper()}": "1"}), f"SLIPSTREAM_{name.upper()}"),
        (lambda: resolve(config_file=path, environ={}), f"The key {name} (in {path})"),
    ):
        with pytest.raises(ConfigError) as caught:
            use()
        first, instead = str(caught.value).splitlines()
        assert first.startswith(f"{shown} asks for something that is not available in this version: ")
        assert title in first
        assert instead


def test_missing_feature_flag_as_typed() -> None:
    """A feature flag is recognised as it was typed."""
    assert str(unknown_flag("--zero-stage=2")).startswith("--zero-stage asks for something")


def test_no_feature_claims_option() -> None:
    """No feature claims an option."""
    assert not [name for name in OPTIONS for feature in FEATURES if feature.claims(name)]
    assert missing_feature("num_processes") is None


@pytest.mark.parametrize("name", ["quiet", "show", "module", "no_python", "multi_gpu"])
def test_command_options_refused_elsewhere(name: str, tmp_path: Path) -> None:
    """What belongs to a command line is refused elsewhere."""
    path = tmp_path / "c.yaml"
    path.write_text(f"{name}: true\n")
    with pytest.raises(ConfigError, match=f"SLIPSTREAM_{name.upper()} cannot be used here.*\nWrite it as a flag: --{name}"):
        resolve(environ={f"SLIPSTREAM_{name.upper()}": "1"})
    with pytest.raises(ConfigError, match=f"The key {name} .*cannot be used here"):
        resolve(config_file=path, environ={})


def test_internal_variables_accepted() -> None:
    """Our own variables are no mistake."""
    environ = {"SLIPSTREAM_HOME": "/nowhere", "SLIPSTREAM_INTERNAL_RUN": "1", "SLIPSTREAM_CONFIG": "", "SLIPSTREAMER": "1"}
    assert resolve(environ=environ).given() == {}


@given(st.text(max_size=30))
def test_any_flag_gets_answer(typed: str) -> None:
    """Any flag gets an answer."""
    assert len(str(unknown_flag("--" + typed)).splitlines()) == 2


@given(st.sampled_from(sorted(OPTIONS)), st.data())
def test_one_wrong_letter(name: str, data: st.DataObject) -> None:
    """One wrong letter still finds the option."""
    place = data.draw(st.integers(0, len(name) - 1))
    typed = name[:place] + "x" + name[place + 1 :]
    if len(name) > 5:
        assert name in nearest(typed, OPTIONS)
