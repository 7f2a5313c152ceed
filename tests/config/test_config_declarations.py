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
def test_help_is_sentence(option: Option) -> None:
    """Every option has help that is a sentence."""
    assert re.fullmatch(r"[A-Z].{10,}[.)]", option.help), option.help


@pytest.mark.parametrize("option", ALL, ids=lambda option: option.name)
def test_default_is_valid(option: Option) -> None:
    """Every default is a value of its option."""
    assert option.default is None or parse(option, option.default, Origin("default")) == option.default


@pytest.mark.parametrize("option", ALL, ids=lambda option: option.name)
def test_example_is_valid_not_default(option: Option) -> None:
    """Every example is a value that is not the default."""
    assert samples(option)


@pytest.mark.parametrize("option", ALL, ids=lambda option: option.name)
def test_default_matches_section(option: Option) -> None:
    """The default is what the section holds."""
    assert getattr(SECTIONS[option.section](), option.name) == option.default


def test_every_field_is_option() -> None:
    """Every field of every section is an option."""
    assert [field.name for section in SECTIONS.values() for field in fields(section)] == list(OPTIONS)


def test_names_unique() -> None:
    """No flag key or variable means two options."""
    for names in (
        [flag for option in ALL for flag in (*flag_names(option), *negative_flag_names(option))],
        [key for option in ALL for key in option.keys],
        [option.variable for option in ALL if option.variable],
    ):
        assert len(names) == len(set(names))


def test_flag_spellings() -> None:
    """Flags come in both spellings and short."""
    assert flag_names(OPTIONS["main_process_ip"]) == ["--main_process_ip", "--main-process-ip"]
    assert flag_names(OPTIONS["module"]) == ["--module", "-m"]
    assert negative_flag_names(OPTIONS["same_network"]) == ["--no_same_network", "--no-same-network"]


def test_switches_have_negative_flag() -> None:
    """Whatever a file can switch on, a flag can switch off: with a flag of its own, or with the value false."""
    assert all(negative_flag_names(option) or option.valued for option in ALL if option.is_switch and option.in_file)


def test_section_is_frozen() -> None:
    """A section cannot be changed."""
    with pytest.raises(FrozenInstanceError):
        resolve(environ={}).safety.timeout = 1.0  # type: ignore[misc]


def test_non_plain_type_refused() -> None:
    """A declaration of a type that is not plain is refused."""
    with pytest.raises(TypeError, match="option size: declare it as"):
        from_field("size", "launch", bytes, declare(None, help="x").default, {"help": "x"})


options_page = runpy.run_path(str(Path(__file__).parents[2] / "docs" / "options_page.py"))["options_page"]


def test_options_page_current() -> None:
    """The page of options is what the declarations give."""
    page = Path(__file__).parents[2] / "docs" / "options.md"
    assert page.read_text() == options_page(), "run: python docs/options_page.py > docs/options.md"


@pytest.mark.parametrize("option", ALL, ids=lambda option: option.name)
def test_options_page_complete(option: Option) -> None:
    """The page names every option with its flag and variable."""
    row = next(line for line in options_page().splitlines() if line.startswith("|") and f"`--{option.name}`" in line)
    assert option.help.replace("|", "\\|") in row
    assert option.variable is None or option.variable in row


def test_import_is_light() -> None:
    """Importing the options imports no torch click rich or YAML."""
    code = "import sys, slipstream.config as c; c.resolve(environ={}); print({'torch', 'click', 'rich', 'yaml'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "set()"


def test_compile_backends_match_torch() -> None:
    """The compile backends are those of torch."""
    code = "import torch._dynamo; print(*torch._dynamo.list_backends(exclude_tags=()))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=True)
    assert set(OPTIONS["dynamo_backend"].choices) - {"no"} <= set(done.stdout.split())


@pytest.mark.parametrize("option", ROUNDTRIP_OPTIONS, ids=lambda option: option.name)
def test_option_round_trip(option: Option, tmp_path: Path) -> None:
    """Flag, file, variable and the way to the worker: the same value arrives."""
    for value in samples(option):
        arrived = pass_through_sources(option, value, tmp_path)
        assert {source: choice.value for source, choice in arrived.items() if choice.value != value} == {}
