"""The resolved configuration in one variable: it arrives whole, and nothing else is accepted in its place."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, strategies as st
from option_roundtrip import samples

from slipstream.config import OPTIONS, ConfigError, Origin, for_worker, resolve, resolved_config

ALONE = ("machine_rank", "cpu", "device", "parallelism_config_dp_shard_size", "fsdp_sharding_strategy")
"""Options whose examples contradict those of others."""


@given(st.sets(st.sampled_from([name for name, option in OPTIONS.items() if option.in_file and name not in ALONE])))
def test_every_value_and_origin_arrives(names: set[str]) -> None:
    """Every value and origin arrives."""
    sent = resolve(flags={name: samples(OPTIONS[name])[0] for name in names}, environ={})
    arrived = resolved_config.load(resolved_config.dump(sent))
    assert arrived == sent
    assert arrived.origins == sent.origins


def test_command_options_stay_behind() -> None:
    """What belongs to the command line stays behind."""
    sent = resolve(flags={"quiet": True, "module": True, "cpu": True}, environ={})
    assert set(resolved_config.load(resolved_config.dump(sent)).given()) == {"cpu"}


def test_sent_call_between_flag_and_script() -> None:
    """A value sent by a call is stronger than a flag and weaker than the script."""
    sent = resolved_config.dump(
        resolve(constructor={"mixed_precision": "bf16"}, flags={"debug": True}, environ={}, caller="notebook_launcher")
    )
    config = for_worker(environ={resolved_config.VARIABLE: sent, "SLIPSTREAM_MIXED_PRECISION": "fp16"})
    assert config.origin("mixed_precision") == Origin("constructor", "notebook_launcher(mixed_precision=...)")
    assert for_worker({"mixed_precision": "no"}, {resolved_config.VARIABLE: sent}).compute.mixed_precision == "no"


def test_newer_version_refused() -> None:
    """A newer version is refused by number."""
    with pytest.raises(
        ConfigError, match=f"has version {resolved_config.VERSION + 1}; this Slipstream understands .* up to {resolved_config.VERSION}"
    ):
        resolved_config.load(json.dumps({"version": resolved_config.VERSION + 1, "options": {"of": "another shape"}}))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "3",
        "null",
        "{}",
        '{"version":"1","options":{}}',
        '{"version":0,"options":{}}',
        '{"version":1}',
        '{"version":1,"options":[]}',
        '{"version":1,"options":{"colour":[1,"flag","--colour"]}}',
        '{"version":1,"options":{"cpu":true}}',
        '{"version":1,"options":{"cpu":[true,"dream",""]}}',
        '{"version":1,"options":{"cpu":[true,"flag",3]}}',
        '{"version":1,"options":{"cpu":[true,["flag"],""]}}',
        "[" * 100_000,
    ],
)
def test_other_text_short_error(text: str) -> None:
    """A text that we did not write is a short error."""
    with pytest.raises(ConfigError, match=r"^The variable SLIPSTREAM_CONFIG does not hold what `slipstream launch` writes there.\n.*$"):
        resolved_config.load(text)


PLAIN = st.none() | st.booleans() | st.integers() | st.text()
DATA = st.recursive(PLAIN, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=10)


@given(st.text() | DATA.map(json.dumps) | DATA.map(lambda data: json.dumps({"version": 1, "options": {"cpu": data}})))
def test_any_text_is_config_error(text: str) -> None:
    """Any other text is a config error."""
    with pytest.raises(ConfigError):
        resolved_config.load(text)
