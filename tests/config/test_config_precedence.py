"""constructor > flags > environment > file > default, for every option and every set of sources; the origin is always right."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import given, settings, strategies as st
from option_roundtrip import REQUIRED_WITH, ROUNDTRIP_OPTIONS, pass_through_sources, samples

from slipstream.config import OPTIONS, Config, ConfigError, Option, for_worker, resolve, resolved_config
from slipstream.config.files import write_file
from slipstream.config.option import Value, option_text

KINDS = ("constructor", "flag", "environment", "file")
IN_FILE = [option for option in OPTIONS.values() if option.in_file]


def two_values(option: Option) -> tuple[Value, Value]:
    """A value for the stronger source and another for the weaker one."""
    (first, *rest) = samples(option)
    return first, rest[0] if rest else option.default if option.default is not None else first


def where(kind: str, name: str, path: Path) -> str:
    return {
        "constructor": f"Accelerator({name}=...)",
        "flag": f"--{name}",
        "environment": f"SLIPSTREAM_{name.upper()}",
        "file": f"{path}: {name}",
    }[kind]


def resolved(name: str, given: Mapping[str, Value], path: Path) -> Config:
    """The option `name` given in several kinds of source at once, with what must be said beside it in the strongest one."""
    companions = dict(REQUIRED_WITH.get(name, {}))
    file = write_file(path, {name: given["file"]}, overwrite=True) if "file" in given else None
    return resolve(
        constructor={**companions, **({name: given["constructor"]} if "constructor" in given else {})},
        flags={name: option_text(given["flag"])} if "flag" in given else {},
        environ={f"SLIPSTREAM_{name.upper()}": option_text(given["environment"])} if "environment" in given else {},
        config_file=file,
    )


@pytest.mark.parametrize(("stronger", "weaker"), list(itertools.combinations(KINDS, 2)))
@pytest.mark.parametrize("option", IN_FILE, ids=lambda option: option.name)
def test_stronger_source_wins(option: Option, stronger: str, weaker: str, tmp_path: Path) -> None:
    """The stronger of two sources wins."""
    winning, losing = two_values(option)
    config = resolved(option.name, {stronger: winning, weaker: losing}, tmp_path / "c.yaml")
    assert config.value(option.name) == winning
    origin = config.origin(option.name)
    assert (origin.kind, origin.where) == (stronger, where(stronger, option.name, tmp_path / "c.yaml"))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("option", [entry for entry in IN_FILE if entry.default not in (None, "")], ids=lambda option: option.name)
def test_any_source_beats_default(option: Option, kind: str, tmp_path: Path) -> None:
    """Every source is stronger than the default even when it says the same."""
    config = resolved(option.name, {kind: option.default}, tmp_path / "c.yaml")
    assert (config.value(option.name), config.origin(option.name).kind) == (option.default, kind)


@settings(max_examples=200, deadline=None)
@given(
    st.sampled_from(IN_FILE).flatmap(
        lambda option: st.tuples(
            st.just(option),
            st.dictionaries(
                st.sampled_from(KINDS), st.sampled_from([*samples(option), *([option.default] if option.default not in (None, "") else [])])
            ),
        )
    )
)
def test_strongest_of_any_set(case: tuple[Option, dict[str, Value]]) -> None:
    """The strongest of any set of sources wins."""
    option, given_in = case
    with tempfile.TemporaryDirectory() as folder:
        config = resolved(option.name, given_in, Path(folder) / "c.yaml")
    strongest = next((kind for kind in KINDS if kind in given_in), "default")
    assert config.origin(option.name).kind == strongest
    assert config.value(option.name) == given_in.get(strongest, option.default)


@pytest.mark.parametrize("option", list(ROUNDTRIP_OPTIONS), ids=lambda option: option.name)
def test_same_value_every_source(option: Option, tmp_path: Path) -> None:
    """A value is the same in every place it can be written."""
    for value in samples(option):
        arrived = pass_through_sources(option, value, tmp_path)
        assert {place: choice.value for place, choice in arrived.items()} == dict.fromkeys(arrived, value)
        assert arrived["flag"].origin.where == f"--{option.name}"
        if option.in_file:
            assert set(arrived) == {"constructor", "flag", "environment", "file", "transport", "worker"}
            assert arrived["worker"].origin == arrived["transport"].origin == arrived["flag"].origin


def test_worker_applies_order(tmp_path: Path) -> None:
    """Sent flags stay above variables that are set now, and those above the sent file."""
    path = write_file(tmp_path / "c.yaml", {"timeout": 1.0, "hang_warning": 1.0, "role": "file", "log_level": "INFO"})
    launcher = resolve(flags={"timeout": "2", "debug": True}, environ={"SLIPSTREAM_LOG_LEVEL": "ERROR"}, config_file=path)
    environ = {
        resolved_config.VARIABLE: resolved_config.dump(launcher),
        "SLIPSTREAM_TIMEOUT": "3",
        "SLIPSTREAM_HANG_WARNING": "4",
        "SLIPSTREAM_CONFIG_FILE": str(tmp_path / "not there.yaml"),
    }
    config = for_worker({"debug": False}, environ)
    assert {name: (config.value(name), config.origin(name).kind) for name in ("debug", "timeout", "hang_warning", "log_level", "role")} == {
        "debug": (False, "constructor"),
        "timeout": (2.0, "flag"),
        "hang_warning": (4.0, "environment"),
        "log_level": ("ERROR", "environment"),
        "role": ("file", "file"),
    }
    assert str(config.origin("role")) == f"from {path}: role"


def test_current_variable_beats_sent() -> None:
    """A variable that is set now is stronger than what the launcher saw."""
    sent = resolved_config.dump(resolve(environ={"SLIPSTREAM_TIMEOUT": "1", "SLIPSTREAM_ROLE": "seen"}))
    config = for_worker(environ={resolved_config.VARIABLE: sent, "SLIPSTREAM_TIMEOUT": "2"})
    assert (config.safety.timeout, config.launch.role) == (2.0, "seen")


def test_script_ignores_default_file(tmp_path: Path) -> None:
    """A script without launcher reads variables and never the default file."""
    write_file(tmp_path / "config.yaml", {"debug": True})
    environ = {"SLIPSTREAM_HOME": str(tmp_path), "SLIPSTREAM_TIMEOUT": "7"}
    config = for_worker(environ=environ)
    assert (config.safety.debug, config.safety.timeout) == (False, 7.0)
    assert resolve(environ=environ, default_file=True).safety.debug is True


def test_script_reads_named_file(tmp_path: Path) -> None:
    """A script without launcher reads the file that a variable names."""
    path = write_file(tmp_path / "mine.yaml", {"debug": True})
    assert for_worker(environ={"SLIPSTREAM_CONFIG_FILE": str(path)}).safety.debug is True


def test_flag_file_beats_variable_file(tmp_path: Path) -> None:
    """The file of a flag is read instead of that of a variable and of the default one."""
    paths = {name: write_file(tmp_path / f"{name}.yaml", {"role": name}) for name in ("flag", "variable", "config")}
    environ = {"SLIPSTREAM_HOME": str(tmp_path), "SLIPSTREAM_CONFIG_FILE": str(paths["variable"])}
    assert resolve(flags={"config_file": str(paths["flag"])}, environ=environ, default_file=True).launch.role == "flag"
    assert resolve(environ=environ, default_file=True).launch.role == "variable"
    assert resolve(environ={"SLIPSTREAM_HOME": str(tmp_path)}, default_file=True).launch.role == "config"


def test_missing_default_file(tmp_path: Path) -> None:
    """A default file that is not there is no mistake."""
    assert resolve(environ={"SLIPSTREAM_HOME": str(tmp_path)}, default_file=True).given() == {}


def test_replace_wins_and_copies() -> None:
    """Replace wins and leaves the original alone."""
    before = resolve(flags={"mixed_precision": "fp16"}, environ={})
    after = before.replace(mixed_precision="bf16", cpu=None, caller="PartialState")
    assert (before.compute.mixed_precision, after.compute.mixed_precision) == ("fp16", "bf16")
    assert str(after.origin("mixed_precision")) == "from PartialState(mixed_precision=...)"
    assert after.origin("cpu").kind == "default"


def test_replace_checks_values() -> None:
    """Replace checks like any other source."""
    with pytest.raises(ConfigError, match=r"num_processes=0 \(from Accelerator\(num_processes=...\)\) is less than 1"):
        resolve(environ={}).replace(num_processes=0)
    with pytest.raises(ConfigError, match=r"The argument Accelerator\(mixed_precison=...\) is not an option.*\nDid you mean mixed_p"):
        resolve(environ={}).replace(mixed_precison="bf16")


def test_unknown_option_name() -> None:
    """Asking a config for a name that is no option is an error."""
    config = resolve(environ={})
    with pytest.raises(ConfigError, match="no option 'colour'"):
        config.value("colour")
    with pytest.raises(ConfigError, match="no option 'colour'"):
        config.origin("colour")


def test_environment_is_read_only_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment is read when asked and cannot be written through."""
    from slipstream.config.sources import environment

    monkeypatch.setenv("SLIPSTREAM_TIMEOUT", "11")
    assert resolve().safety.timeout == 11.0
    with pytest.raises(TypeError):
        environment()["SLIPSTREAM_TIMEOUT"] = "12"  # type: ignore[index]
