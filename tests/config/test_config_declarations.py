"""The declarations themselves: complete, consistent, and the only place from which everything else derives."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
from dataclasses import FrozenInstanceError, fields
from pathlib import Path

import pytest
from option_roundtrip import ROUNDTRIP_OPTIONS, pass_through_sources, samples

from slipstream.config import OPTIONS, Option, Origin, flag_names, negative_flag_names, resolve
from slipstream.config.option import declare, from_field, parse
from slipstream.config.schema import SECTIONS

ALL = list(OPTIONS.values())


@pytest.mark.parametrize("option", ALL, ids=lambda option: option.name)
def test_every_option_has_help_that_is_a_sentence(option: Option) -> None:
    assert re.fullmatch(r"[A-Z].{10,}[.)]", option.help), option.help


@pytest.mark.parametrize("option", ALL, ids=lambda option: option.name)
def test_every_default_is_a_value_of_its_option(option: Option) -> None:
    assert option.default is None or parse(option, option.default, Origin("default")) == option.default


@pytest.mark.parametrize("option", ALL, ids=lambda option: option.name)
def test_every_example_is_a_value_that_is_not_the_default(option: Option) -> None:
    assert samples(option)


@pytest.mark.parametrize("option", ALL, ids=lambda option: option.name)
def test_the_default_is_what_the_section_holds(option: Option) -> None:
    assert getattr(SECTIONS[option.section](), option.name) == option.default


def test_every_field_of_every_section_is_an_option() -> None:
    assert [field.name for section in SECTIONS.values() for field in fields(section)] == list(OPTIONS)


def test_no_flag_key_or_variable_means_two_options() -> None:
    for names in (
        [flag for option in ALL for flag in (*flag_names(option), *negative_flag_names(option))],
        [key for option in ALL for key in option.keys],
        [option.variable for option in ALL if option.variable],
    ):
        assert len(names) == len(set(names))


def test_flags_come_in_both_spellings_and_short() -> None:
    assert flag_names(OPTIONS["main_process_ip"]) == ["--main_process_ip", "--main-process-ip"]
    assert flag_names(OPTIONS["module"]) == ["--module", "-m"]
    assert negative_flag_names(OPTIONS["same_network"]) == ["--no_same_network", "--no-same-network"]


def test_whatever_a_file_can_switch_on_a_flag_can_switch_off() -> None:
    assert all(negative_flag_names(option) for option in ALL if option.is_switch and option.in_file)


def test_a_section_cannot_be_changed() -> None:
    with pytest.raises(FrozenInstanceError):
        resolve(environ={}).safety.timeout = 1.0  # type: ignore[misc]


def test_a_declaration_of_a_type_that_is_not_plain_is_refused() -> None:
    with pytest.raises(TypeError, match="option size: declare it as"):
        from_field("size", "launch", bytes, declare(None, help="x").default, {"help": "x"})


options_page = runpy.run_path(str(Path(__file__).parents[2] / "docs" / "options_page.py"))["options_page"]


def test_the_page_of_options_is_what_the_declarations_give() -> None:
    page = Path(__file__).parents[2] / "docs" / "options.md"
    assert page.read_text() == options_page(), "run: python docs/options_page.py > docs/options.md"


@pytest.mark.parametrize("option", ALL, ids=lambda option: option.name)
def test_the_page_names_every_option_with_its_flag_and_variable(option: Option) -> None:
    row = next(line for line in options_page().splitlines() if line.startswith("|") and f"`--{option.name}`" in line)
    assert option.help.replace("|", "\\|") in row
    assert option.variable is None or option.variable in row


def test_importing_the_options_imports_no_torch_click_rich_or_yaml() -> None:
    code = "import sys, slipstream.config as c; c.resolve(environ={}); print({'torch', 'click', 'rich', 'yaml'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "set()"


def test_the_compile_backends_are_those_of_torch() -> None:
    code = "import torch._dynamo; print(*torch._dynamo.list_backends(exclude_tags=()))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=True)
    assert set(OPTIONS["dynamo_backend"].choices) - {"no"} <= set(done.stdout.split())


@pytest.mark.parametrize("option", ROUNDTRIP_OPTIONS, ids=lambda option: option.name)
def test_every_option_survives_the_round_trip(option: Option, tmp_path: Path) -> None:
    """Flag, file, variable and the way to the worker: the same value arrives."""
    for value in samples(option):
        arrived = pass_through_sources(option, value, tmp_path)
        assert {source: choice.value for source, choice in arrived.items() if choice.value != value} == {}
