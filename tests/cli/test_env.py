"""`slipstream env`: quick, complete enough, and without secrets."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from click.testing import CliRunner

from slipstream.cli.env import command
from slipstream.observability.run_dir.environment import environment_report as report


def test_imports_no_torch() -> None:
    """It imports no torch."""
    code = (
        "import sys\nfrom slipstream.observability.run_dir.environment import environment_report\nenvironment_report({})\n"
        "assert not {'torch', 'numpy', 'rich'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_installed_versions_named() -> None:
    """The installed versions are named."""
    versions = report({})["versions"]
    assert {"slipstream", "torch", "numpy", "python"} <= set(versions)


def test_variables_without_secrets() -> None:
    """Only variables that matter are reported and secrets are not."""
    environ = {"NCCL_DEBUG": "INFO", "HF_TOKEN": "hf_secretvalue", "SLIPSTREAM_TIMEOUT": "60", "DIARY": "mine", "OMP_NUM_THREADS": "2"}
    assert report(environ)["environment"] == {
        "HF_TOKEN": "[redacted]", "NCCL_DEBUG": "INFO", "OMP_NUM_THREADS": "2", "SLIPSTREAM_TIMEOUT": "60",
    }  # fmt: skip


def test_config_with_origins(tmp_path: Path) -> None:
    """The configuration in force is shown with origins."""
    file = tmp_path / "config.yaml"
    file.write_text("num_processes: 4\n")
    found = report({"SLIPSTREAM_TIMEOUT": "60"}, config_file=str(file))["configuration"]
    assert found["num_processes"].startswith("4 (from ")
    assert "config.yaml" in found["num_processes"]
    assert found["timeout"] == "60.0 (from SLIPSTREAM_TIMEOUT)"


def test_broken_config_reported() -> None:
    """A configuration that cannot be read is reported and not raised."""
    assert "SLIPSTREAM_TIMEOUT" in report({"SLIPSTREAM_TIMEOUT": "soon"})["configuration"]["error"]


def test_home_folder_hidden() -> None:
    """The home of the user is not named."""
    found = report({"HOME": "/home/somebody", "PYTHONPATH": "/home/somebody/code"})
    assert found["environment"]["PYTHONPATH"] == "~/code"


def test_rendezvous_secrets_hidden() -> None:
    """Secrets in rendezvous settings are hidden."""
    found = report({"SLIPSTREAM_RDZV_CONF": "password=hunter2"})
    assert "hunter2" not in json.dumps(found)


def test_text_has_every_section() -> None:
    """The text has every section."""
    result = CliRunner().invoke(command, [])
    assert result.exit_code == 0
    assert [line for line in result.output.splitlines() if not line.startswith(" ")] == [
        "Versions", "System", "Devices", "Configuration", "Environment",
    ]  # fmt: skip


def test_json_same_report() -> None:
    """JSON is the same report."""
    result = CliRunner().invoke(command, ["--json"])
    assert json.loads(result.output)["versions"]["python"].startswith(f"{sys.version_info.major}.{sys.version_info.minor}")


def test_deep_asks_torch() -> None:
    """Deep asks torch."""
    result = CliRunner().invoke(command, ["--json", "--deep"])
    found = json.loads(result.output)["torch"]
    assert "gloo" in found["backends"]
    assert "device cpu" in found


def test_named_device_shown() -> None:
    """The device that an option names is reported with its origin, and what is wrong with it."""
    shown = report({"SLIPSTREAM_DEVICE": "standin", "STANDIN_VISIBLE_DEVICES": "1"})
    assert (shown["devices"]["type"], shown["devices"]["accelerators"]) == ("standin", 1)
    assert shown["devices"]["chosen by"] == "device=standin (from SLIPSTREAM_DEVICE)"
    assert shown["environment"]["STANDIN_VISIBLE_DEVICES"] == "1"
    assert "torch_npu is not installed" in report({"SLIPSTREAM_DEVICE": "npu"})["devices"]["cannot be used"]
    assert "no such device family" in report({"SLIPSTREAM_DEVICE": "gpu"})["devices"]["error"]
