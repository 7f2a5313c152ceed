"""One value at a time: what a text becomes, and what is said about one that cannot be."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from slipstream.config import OPTIONS, ConfigError, Option, Origin, resolve
from slipstream.config.option import parse

FLAG = Origin("flag", "--x")


def complaint(name: str, raw: object, origin: Origin = FLAG) -> str:
    with pytest.raises(ConfigError) as caught:
        parse(OPTIONS[name], raw, origin)
    return str(caught.value)


@pytest.mark.parametrize(
    ("name", "raw", "value"),
    [
        ("num_processes", " 4 ", 4),
        ("num_processes", "+2", 2),
        ("timeout", "60", 60.0),
        ("timeout", 60, 60.0),
        ("monitor_interval", "1e-2", 0.01),
        ("cpu", "yes", True),
        ("cpu", "Off", False),
        ("cpu", 1, True),
        ("same_network", "0", False),
        ("mixed_precision", "BF16", "bf16"),
        ("mixed_precision", False, "no"),
        ("dynamo_backend", "INDUCTOR", "inductor"),
        ("log_level", "info", "INFO"),
        ("gpu_ids", 0, "0"),
        ("gpu_ids", "0, 1", "0, 1"),
        ("gpu_ids", "GPU-8932f937,1", "GPU-8932f937,1"),
        ("tee", 3, "3"),
        ("tee", "0:3,1:1", "0:3,1:1"),
        ("main_process_ip", "fe80::1%eth0", "fe80::1%eth0"),
        ("main_process_port", "0", 0),
        ("rdzv_conf", "", ""),
        ("hang_warning", "0", 0.0),
    ],
)
def test_text_becomes_value(name: str, raw: object, value: object) -> None:
    """A text becomes a value."""
    parsed = parse(OPTIONS[name], raw, FLAG)
    assert (parsed, type(parsed)) == (value, type(value))


@pytest.mark.parametrize(
    ("name", "raw", "why"),
    [
        ("num_processes", "zero", "is not a whole number"),
        ("num_processes", "0", "is less than 1"),
        ("num_processes", "-3", "is less than 1"),
        ("num_processes", "2.5", "is not a whole number"),
        ("num_processes", 2.0, "is not a whole number"),
        ("num_processes", True, "is not a whole number"),
        ("num_processes", "²", "is not a whole number"),
        ("num_processes", "9" * 5000, "is not a whole number"),
        ("num_processes", [2], "is not a whole number"),
        ("timeout", "0", "is not above 0"),
        ("timeout", "soon", "is not a number"),
        ("timeout", "nan", "is not a finite number"),
        ("timeout", "inf", "is not a finite number"),
        ("timeout", True, "is not a number"),
        ("timeout", 10**400, "is not a number"),
        ("hang_warning", "-1", "is less than 0"),
        ("main_process_port", "65536", "is more than 65535"),
        ("main_process_ip", "two words", "is not a host name or an address"),
        ("main_process_ip", "", "is not a host name or an address"),
        ("cpu", "perhaps", "is neither yes nor no"),
        ("cpu", 2, "is neither yes nor no"),
        ("mixed_precision", "fp64", "is not one of the choices"),
        ("mixed_precision", True, "is not one of the choices"),
        ("role", False, "is not text"),
        ("role", "", "is empty"),
        ("role", "a\nb", "holds a line break"),
        ("log_dir", {"a": 1}, "is not text"),
        ("gpu_ids", "al", "is neither the word all nor"),
        ("gpu_ids", "0,,1", "is neither the word all nor"),
        ("gpu_ids", "0,0", "names a device twice"),
        ("tee", "4", "is not a number from 0 to 3"),
        ("tee", "0:9", "is not a number from 0 to 3"),
        ("rdzv_conf", "timeout", "is not a list of name=value pairs"),
        ("rdzv_conf", "a=1,a=2", "gives a name twice"),
    ],
)
def test_bad_value_named_with_origin(name: str, raw: object, why: str) -> None:
    """A value that cannot be is named with its origin and the reason."""
    text = complaint(name, raw)
    assert text.startswith(f"{name}=")
    assert f"(from --x) {why}" in text
    assert len(text.splitlines()) == 2
    assert len(text) < 400


@pytest.mark.parametrize(
    ("origin", "suggestion"),
    [
        (Origin("flag", "--num_processes"), "--num_processes 2"),
        (Origin("environment", "SLIPSTREAM_NUM_PROCESSES"), "SLIPSTREAM_NUM_PROCESSES=2"),
        (Origin("file", "a.yaml: num_processes"), "num_processes: 2"),
        (Origin("constructor", "Accelerator(num_processes=...)"), "num_processes=2"),
    ],
)
def test_suggestion_matches_source(origin: Origin, suggestion: str) -> None:
    """The suggestion is written the way of its source."""
    assert complaint("num_processes", "zero", origin).endswith(f"for example: {suggestion}")


def test_bad_switch_suggests_flag() -> None:
    """A bad switch suggests a flag without a value."""
    assert complaint("cpu", "perhaps", Origin("flag", "--cpu")).endswith("for example: --cpu")


def test_suggestion_for_call_is_python() -> None:
    """The suggestion for a call is Python."""
    call = Origin("constructor", "Accelerator(...)")
    assert complaint("cpu", "perhaps", call).endswith("for example: cpu=True")
    assert complaint("mixed_precision", "fp64", call).endswith("for example: mixed_precision='bf16'")


def test_bad_choice_lists_choices() -> None:
    """A choice that cannot be lists the choices."""
    assert "one of no, fp16, bf16, fp8" in complaint("mixed_precision", "fp64")


ANYTHING = st.one_of(st.text(), st.integers(), st.floats(), st.booleans(), st.binary(), st.lists(st.integers()))


@given(st.sampled_from(list(OPTIONS.values())), ANYTHING)
def test_any_input_value_or_error(option: Option, raw: object) -> None:
    """Any input gives a value of the declared type or a short error."""
    try:
        value, text = parse(option, raw, FLAG), ""
    except ConfigError as error:
        value, text = option.default, str(error)
    assert len(text) < 600
    assert len(text.splitlines()) in (0, 2)
    assert value is None or type(value) is option.type
    assert value is None or not option.choices or value in option.choices


NUMBERS = [option for option in OPTIONS.values() if option.type in (int, float)]


@given(st.sampled_from(NUMBERS), st.floats(-10, 1e6))
def test_number_bounds(option: Option, number: float) -> None:
    """A number within its bounds is accepted and no other."""
    raw = int(number) if option.type is int else number
    fits = (
        (option.minimum is None or raw >= option.minimum)
        and (option.above is None or raw > option.above)
        and (option.maximum is None or raw <= option.maximum)
    )
    if fits:
        assert parse(option, str(raw), FLAG) == raw
    else:
        assert complaint(option.name, str(raw))


def test_none_means_not_given() -> None:
    """None means not given everywhere."""
    config = resolve(constructor={"cpu": None}, flags={"cpu": None}, environ={"SLIPSTREAM_CPU": ""})
    assert config.origin("cpu").kind == "default"
