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


def test_a_file_of_our_own(tmp_path: Path) -> None:
    config = reading(tmp_path / "c.yaml", "version: 1\nnum_processes: 4\nmixed_precision: no\ncpu: true\nrole: null\n")
    assert (config.launch.num_processes, config.compute.mixed_precision, config.device.cpu) == (4, "no", True)
    assert str(config.origin("num_processes")) == f"from {tmp_path / 'c.yaml'}: num_processes"
    assert config.origin("role").kind == "default"
    assert config.unused == ()


def test_a_file_without_a_version_is_read_like_one_of_today(tmp_path: Path) -> None:
    assert reading(tmp_path / "c.yaml", "timeout: 5\n").safety.timeout == 5.0


def test_an_empty_file_says_nothing(tmp_path: Path) -> None:
    assert reading(tmp_path / "c.yaml", "# nothing yet\n").given().keys() == {"config_file"}


def test_a_json_file_is_read_too(tmp_path: Path) -> None:
    assert reading(tmp_path / "c.json", json.dumps({"version": 1, "num_processes": 2})).launch.num_processes == 2


def test_a_home_directory_is_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
def test_a_file_that_cannot_be_used_is_a_short_error_with_its_path(text: str | bytes, why: str, tmp_path: Path) -> None:
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
def test_a_json_file_that_cannot_be_used(text: str, why: str, tmp_path: Path) -> None:
    assert why in complaint(tmp_path / "c.json", text)


def test_a_file_that_does_not_exist(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere.yaml does not exist.\nMake one with: slipstream config --config_file "):
        resolve(config_file=tmp_path / "nowhere.yaml", environ={})


def test_a_folder_is_not_a_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read: Is a directory"):
        resolve(config_file=tmp_path, environ={})


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_that_may_not_be_read(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("debug: true\n")
    path.chmod(0)
    with pytest.raises(ConfigError, match="cannot be read: Permission denied"):
        resolve(config_file=path, environ={})


@settings(max_examples=150, deadline=None)
@given(st.text() | st.dictionaries(st.sampled_from([*OPTIONS, "version", "fsdp_config", "distributed_type"]), st.text()).map(json.dumps))
def test_any_file_is_a_config_or_a_config_error(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
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
def test_where_the_default_file_is(environ: dict[str, str], path: str) -> None:
    assert default_file_path(environ).as_posix() == path


def test_what_we_write_is_what_we_read(tmp_path: Path) -> None:
    values = {name: samples(option)[0] for name, option in OPTIONS.items() if option.in_file and name not in ("gpu_ids", "machine_rank")}
    for suffix in ("yaml", "json"):
        path = write_file(tmp_path / f"c.{suffix}", values)
        read = resolve(config_file=path, environ={}).given()
        assert {name: choice.value for name, choice in read.items() if name != "config_file"} == values


@pytest.mark.parametrize("value", ["1:3", "0:3,1:1"])
def test_a_text_that_yaml_would_take_for_a_number_survives(value: str, tmp_path: Path) -> None:
    assert resolve(config_file=write_file(tmp_path / "c.yaml", {"tee": value}), environ={}).launch.tee == value


def test_what_belongs_to_the_command_line_is_not_written() -> None:
    assert "quiet" not in file_text({"quiet": True})


def test_a_file_is_for_its_owner_alone_and_leaves_nothing_beside_it(tmp_path: Path) -> None:
    path = write_file(tmp_path / "new" / "folder" / "c.yaml", {"debug": True})
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert os.listdir(path.parent) == ["c.yaml"]


def test_an_existing_file_is_kept_unless_asked(tmp_path: Path) -> None:
    path = write_file(tmp_path / "c.yaml", {"debug": True})
    with pytest.raises(ConfigError, match="exists already.\nGive another --config_file, or --overwrite"):
        write_file(path, {"debug": False})
    assert read_file(path)["debug"] is True
    write_file(path, {"debug": False}, overwrite=True)
    assert read_file(path)["debug"] is False


def test_a_link_to_the_file_stays_a_link(tmp_path: Path) -> None:
    target = write_file(tmp_path / "real.yaml", {"debug": True})
    link = tmp_path / "link.yaml"
    link.symlink_to(target)
    write_file(link, {"debug": False}, overwrite=True)
    assert link.is_symlink()
    assert read_file(target)["debug"] is False


def test_a_place_that_cannot_be_written_is_a_short_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be written"):
        write_file(tmp_path / "file" / "c.yaml", {})
    with pytest.raises(ConfigError, match="is a folder, not a file"):
        write_file(tmp_path, {}, overwrite=True)


def test_backups_do_not_replace_each_other(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("first")
    first = back_up(path)
    path.write_text("second")
    second = back_up(path)
    assert (first.name, first.read_text()) == ("c.yaml.bak", "first")
    assert (second.name, second.read_text()) == ("c.yaml.bak2", "second")


def test_write_basic_config_writes_a_minimal_file_and_keeps_an_existing_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLIPSTREAM_HOME", str(tmp_path))
    assert write_basic_config("bf16") == tmp_path / "config.yaml"
    assert read_file(tmp_path / "config.yaml") == {"version": 1, "mixed_precision": "bf16"}
    with pytest.warns(UserWarning, match="exists already and was kept"):
        assert write_basic_config("fp16") is False
    assert resolve(default_file=True).compute.mixed_precision == "bf16"
    with pytest.raises(ConfigError, match=r"mixed_precision=fp64 \(from write_basic_config\(mixed_precision=...\)\)"):
        write_basic_config("fp64", tmp_path / "other.yaml")
