"""Files of our own: what they say, and what is said about those that cannot be read."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path

import pytest
from hypothesis import given, settings, strategies as st
from option_roundtrip import samples

from slipstream.config import OPTIONS, Config, ConfigError, resolve
from slipstream.config.files import back_up, file_text, write_basic_config, write_file
from slipstream.config.sources import default_file_path, read_file


def reading(path: Path, text: str | bytes) -> Config:
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return resolve(config_file=path, environ={})


def complaint(path: Path, text: str | bytes) -> str:
    with pytest.raises(ConfigError) as caught:
        reading(path, text)
    assert 1 <= len(str(caught.value).splitlines()) <= 3
    assert str(path) in str(caught.value)
    return str(caught.value)


def test_own_file(tmp_path: Path) -> None:
    """A file of our own."""
    config = reading(tmp_path / "c.yaml", "version: 1\nnum_processes: 4\nmixed_precision: no\ncpu: true\nrole: null\n")
    assert (config.launch.num_processes, config.compute.mixed_precision, config.device.cpu) == (4, "no", True)
    assert str(config.origin("num_processes")) == f"from {tmp_path / 'c.yaml'}: num_processes"
    assert config.origin("role").kind == "default"
    assert config.unused == ()


def test_file_without_version(tmp_path: Path) -> None:
    """A file without a version is read like one of today."""
    assert reading(tmp_path / "c.yaml", "timeout: 5\n").safety.timeout == 5.0


def test_empty_file(tmp_path: Path) -> None:
    """An empty file says nothing."""
    assert reading(tmp_path / "c.yaml", "# nothing yet\n").given().keys() == {"config_file"}


def test_json_file(tmp_path: Path) -> None:
    """A JSON file is read too."""
    assert reading(tmp_path / "c.json", json.dumps({"version": 1, "num_processes": 2})).launch.num_processes == 2


def test_home_directory_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A home directory is expanded."""
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "c.yaml").write_text("debug: true\n")
    assert resolve(config_file="~/c.yaml", environ={}).safety.debug is True


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("- a\n- b\n", "holds a list, not keys with values"),
        ("just words\n", "holds a single value, not keys with values"),
        ("42\n", "holds a single value"),
        ("1: 2\n", "has the key 1, which is not text"),
        ("true: 2\n", "has the key True, which is not text"),
        ("a: [\n", "is not YAML"),
        ("a: b: c\n", "is not YAML: mapping values are not allowed here in line 1"),
        ("\tnum_processes: 2\n", "is not YAML"),
        ("num_processes: 2\nnum_processes: 4\n", "has the key num_processes twice, again in line 2"),
        ("x: !!python/object/apply:os.getcwd []\n", "is not YAML: could not determine a constructor"),
        ("a: 1\n---\nb: 2\n", "is not YAML"),
        (b"role: \xff\xfe\n", "is not text in UTF-8 (byte 6)"),
        ("role: \x00\n", "is not YAML"),
        ("a: " + "[" * 20_000, "is nested too deeply"),
        ("role: " + "x" * (1 << 20), "is larger than a mebibyte"),
        ("version: 2\n", "has version 2; this Slipstream understands versions up to 1"),
        ("version: 0\n", "is not a version of our files"),
        ("version: one\n", "is not a version of our files"),
        ("version: true\n", "is not a version of our files"),
        ("launch:\n  num_processes: 2\n", "is a group of options, but files are flat"),
        ("version: 1\ncpu: true\nuse_cpu: false\n", "The keys cpu and use_cpu"),
        ("num_processes: many\n", "is not a whole number"),
        ("num_processes: [1, 2]\n", "is not a whole number"),
        ("timeout: 2024-01-01\n", "is not a number"),
    ],
)
def test_bad_file_error_names_path(text: str | bytes, why: str, tmp_path: Path) -> None:
    """A file that cannot be used is a short error with its path."""
    assert why in complaint(tmp_path / "c.yaml", text)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("{", "is not JSON"),
        ("[]", "holds a list"),
        ('{"cpu": true, "cpu": false}', "has the key cpu twice"),
        ("[" * 100_000, "is nested too deeply"),
    ],
)
def test_bad_json_file(text: str, why: str, tmp_path: Path) -> None:
    """A JSON file that cannot be used."""
    assert why in complaint(tmp_path / "c.json", text)


def test_missing_file(tmp_path: Path) -> None:
    """A file that does not exist."""
    with pytest.raises(ConfigError, match=r"nowhere.yaml does not exist.\nMake one with: slipstream config --config_file "):
        resolve(config_file=tmp_path / "nowhere.yaml", environ={})


def test_folder_is_not_file(tmp_path: Path) -> None:
    """A folder is not a file."""
    with pytest.raises(ConfigError, match="cannot be read: Is a directory"):
        resolve(config_file=tmp_path, environ={})


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_unreadable_file(tmp_path: Path) -> None:
    """A file that may not be read."""
    path = tmp_path / "c.yaml"
    path.write_text("debug: true\n")
    path.chmod(0)
    with pytest.raises(ConfigError, match="cannot be read: Permission denied"):
        resolve(config_file=path, environ={})


@settings(max_examples=150, deadline=None)
@given(st.text() | st.dictionaries(st.sampled_from([*OPTIONS, "version", "fsdp_config", "distributed_type"]), st.text()).map(json.dumps))
def test_any_file_config_or_error(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    """Any file is a config or a config error."""
    path = tmp_path_factory.getbasetemp() / "any.yaml"
    path.write_bytes(text.encode("utf-8", "replace"))
    try:
        config: object = resolve(config_file=path, environ={})
    except ConfigError as error:
        config = error
    assert isinstance(config, (Config, ConfigError))


@pytest.mark.parametrize(
    ("environ", "path"),
    [
        ({"SLIPSTREAM_HOME": "/site", "XDG_CONFIG_HOME": "/xdg", "HOME": "/home/me"}, "/site/config.yaml"),
        ({"XDG_CONFIG_HOME": "/xdg", "HOME": "/home/me"}, "/xdg/slipstream/config.yaml"),
        ({"XDG_CONFIG_HOME": "relative", "HOME": "/home/me"}, "/home/me/.config/slipstream/config.yaml"),
        ({"HOME": "/home/me"}, "/home/me/.config/slipstream/config.yaml"),
    ],
)
def test_default_file_location(environ: dict[str, str], path: str) -> None:
    """Where the default file is."""
    assert default_file_path(environ).as_posix() == path


def test_written_file_reads_back(tmp_path: Path) -> None:
    """What we write is what we read."""
    alone = ("gpu_ids", "machine_rank", "parallelism_config_dp_shard_size", "fsdp_sharding_strategy")  # contradict others
    values = {name: samples(option)[0] for name, option in OPTIONS.items() if option.in_file and name not in alone}
    for suffix in ("yaml", "json"):
        path = write_file(tmp_path / f"c.{suffix}", values)
        read = resolve(config_file=path, environ={}).given()
        assert {name: choice.value for name, choice in read.items() if name != "config_file"} == values


@pytest.mark.parametrize("value", ["1:3", "0:3,1:1"])
def test_text_like_number_survives(value: str, tmp_path: Path) -> None:
    """A text that YAML would take for a number survives."""
    assert resolve(config_file=write_file(tmp_path / "c.yaml", {"tee": value}), environ={}).launch.tee == value


def test_command_options_not_written() -> None:
    """What belongs to the command line is not written."""
    assert "quiet" not in file_text({"quiet": True})


def test_file_private_and_alone(tmp_path: Path) -> None:
    """A file is for its owner alone and leaves nothing beside it."""
    path = write_file(tmp_path / "new" / "folder" / "c.yaml", {"debug": True})
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert os.listdir(path.parent) == ["c.yaml"]


def test_existing_file_kept(tmp_path: Path) -> None:
    """An existing file is kept unless asked."""
    path = write_file(tmp_path / "c.yaml", {"debug": True})
    with pytest.raises(ConfigError, match="exists already.\nGive another --config_file, or --overwrite"):
        write_file(path, {"debug": False})
    assert read_file(path)["debug"] is True
    write_file(path, {"debug": False}, overwrite=True)
    assert read_file(path)["debug"] is False


def test_link_stays_link(tmp_path: Path) -> None:
    """A link to the file stays a link."""
    target = write_file(tmp_path / "real.yaml", {"debug": True})
    link = tmp_path / "link.yaml"
    link.symlink_to(target)
    write_file(link, {"debug": False}, overwrite=True)
    assert link.is_symlink()
    assert read_file(target)["debug"] is False


def test_unwritable_path_error(tmp_path: Path) -> None:
    """A place that cannot be written is a short error."""
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be written"):
        write_file(tmp_path / "file" / "c.yaml", {})
    with pytest.raises(ConfigError, match="is a folder, not a file"):
        write_file(tmp_path, {}, overwrite=True)


def test_backups_kept(tmp_path: Path) -> None:
    """Backups do not replace each other."""
    path = tmp_path / "c.yaml"
    path.write_text("first")
    first = back_up(path)
    path.write_text("second")
    second = back_up(path)
    assert (first.name, first.read_text()) == ("c.yaml.bak", "first")
    assert (second.name, second.read_text()) == ("c.yaml.bak2", "second")


def test_write_basic_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Write basic config writes a minimal file and keeps an existing one."""
    monkeypatch.setenv("SLIPSTREAM_HOME", str(tmp_path))
    assert write_basic_config("bf16") == tmp_path / "config.yaml"
    assert read_file(tmp_path / "config.yaml") == {"version": 1, "mixed_precision": "bf16"}
    with pytest.warns(UserWarning, match="exists already and was kept"):
        assert write_basic_config("fp16") is False
    assert resolve(default_file=True).compute.mixed_precision == "bf16"
    with pytest.raises(ConfigError, match=r"mixed_precision=fp64 \(from write_basic_config\(mixed_precision=...\)\)"):
        write_basic_config("fp64", tmp_path / "other.yaml")
