"""`slipstream config`: make and change configuration files.

    slipstream config                      asks questions and writes the answers
    slipstream config --set name=value     sets options in the file without asking; nothing after = removes one
    slipstream config default              writes a minimal file
    slipstream config update               rewrites an older file, or one of `accelerate config`, as ours

The questions come from the declarations of the options, are asked only where earlier answers make them relevant, and each answer is
checked at once. A file is written whole or not at all. Nothing here imports torch.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Final

import click

from slipstream.config.files import ConfigFile, back_up, file_text, parse_config_file, write_file
from slipstream.config.names import unknown_name
from slipstream.config.option import Option, Origin, Value, parse
from slipstream.config.resolved_config import Choice, build_config
from slipstream.config.schema import OPTIONS
from slipstream.config.sources import default_file_path, environment, read_file
from slipstream.devices.table import named_family
from slipstream.errors import ConfigError

__all__ = ["Ask", "command", "interview"]

Ask = Callable[[str, str, Callable[[str], Value]], Value]
"""Asks a question. Arguments: its text, the default as text, and a function that parses the answer or raises ConfigError."""

_ANSWER: Final = Origin("file", "your answer")
_SETTING: Final = Origin("constructor", "--set")  # written name=value, like an argument of a call


def _file_option(function: Callable[..., Any]) -> Callable[..., Any]:
    text = "The file to write; without it, the one that `slipstream launch` reads by itself."
    return click.option("--config_file", "--config-file", "config_file", metavar="FILE", help=text)(function)


@click.group(name="config", invoke_without_command=True, short_help="Make or change a configuration file.")
@_file_option
@click.option("--set", "settings", multiple=True, metavar="NAME=VALUE", help="Set an option without asking; NAME= takes it out.")
@click.pass_context
def command(context: click.Context, config_file: str | None, settings: tuple[str, ...]) -> None:
    """Make or change a configuration file.

    Asks questions and writes the answers, or sets options with --set without asking.
    """
    if context.invoked_subcommand is not None:
        if settings:
            raise ConfigError(f"--set does not go with `config {context.invoked_subcommand}`.\nWrite slipstream config --set ...")
        context.obj = config_file
        return
    path = _config_path(config_file)
    values = _existing(path)
    if settings:
        values = _with_settings(values, settings)
        _announce(path)
    elif sys.stdin is not None and sys.stdin.isatty():
        click.echo(f"The answers are written to {path}. Enter keeps the value in brackets.\n")
        values = interview(_prompt, values)
    else:
        raise ConfigError(
            "`slipstream config` asks questions, and there is no terminal to ask on.\n"
            "Give the answers: slipstream config --set num_processes=2 --set mixed_precision=bf16"
        )
    _report(write_file(path, values, overwrite=True))


@command.command(name="default", short_help="Write a minimal file.")
@_file_option
@click.option("--mixed_precision", "--mixed-precision", "mixed_precision", metavar="FORMAT", help=OPTIONS["mixed_precision"].help)
@click.option("--overwrite", is_flag=True, help="Replace the file if it exists.")
@click.pass_obj
def _default(outer_file: str | None, config_file: str | None, mixed_precision: str | None, overwrite: bool) -> None:
    """Write a minimal file.

    The number of processes is left out: `slipstream launch` then starts one per accelerator.
    """
    option = OPTIONS["mixed_precision"]
    given = option.default if mixed_precision is None else parse(option, mixed_precision, Origin("flag", "--mixed_precision"))
    path = _config_path(config_file or outer_file)
    if overwrite or not path.exists():  # else it is refused
        _announce(path)
    _report(write_file(path, {option.name: given}, overwrite=overwrite))


@command.command(name="update", short_help="Rewrite an older file, or one of `accelerate config`, as ours.")
@_file_option
@click.pass_obj
def _update(outer_file: str | None, config_file: str | None) -> None:
    """Rewrite an older file, or one of `accelerate config`, as ours.

    The old one is kept beside it. Keys that have no effect are dropped, and named.
    """
    path = _config_path(config_file or outer_file)
    reading = parse_config_file(read_file(path), str(path))
    _check(reading.choices)
    values = {name: choice.value for name, choice in reading.choices.items()}
    if Path(path).read_text("utf-8-sig") == file_text(values, as_json=path.suffix == ".json"):
        click.echo(f"{path} is up to date.")
        return
    _announce(path)
    copy = back_up(path)
    written = write_file(path, values, overwrite=True)
    for unused in reading.unused:
        click.echo(f"dropped {unused}")
    click.echo(f"Kept the old file as {copy}.")
    _report(written)


def interview(ask: Ask, existing: Mapping[str, Value]) -> dict[str, Value]:
    """Ask the questions of the options, each with the value of `existing` or its default; return the values for the file.

    An option without a question keeps its value; one whose question is not relevant after the answers is left out.
    """
    answers: dict[str, Value] = {name: value for name, value in existing.items() if OPTIONS[name].question is None}
    for option in OPTIONS.values():
        if option.question is None or (option.asked_when is not None and not option.asked_when(answers)):
            continue
        current = existing.get(option.name, option.default)
        choices = f" ({', '.join(option.choices)})" if option.choices else " (yes, no)" if option.is_switch else ""
        reader = functools.partial(_answer, option, dict(answers))
        answers[option.name] = ask(f"{option.question}{choices}", _current(option, current), reader)
    return answers


def _answer(option: Option, answers: Mapping[str, Value], text: str) -> Value:
    """Return the value of an answer, checked together with the answers before it."""
    if option.default is None and text.strip().lower() == option.unset:
        return None
    value = parse(option, text.strip(), _ANSWER)
    _check({name: Choice(given, _ANSWER) for name, given in {**answers, option.name: value}.items() if given is not None})
    return value


def _check(choices: Mapping[str, Choice]) -> None:
    """Raise if the options contradict each other, or if there is no such device family; it need not be on this machine."""
    config = build_config(choices)
    if config.device.family is not None:
        named_family(config.device.family, config.describe_device())


def _current(option: Option, value: Value) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return option.unset if value is None else str(value)


def _prompt(question: str, default_text: str, reader: Callable[[str], Value]) -> Value:
    def checked(text: str) -> Value:
        try:
            return reader(text)
        except ConfigError as error:
            raise click.UsageError(str(error)) from None  # click prints it and asks again

    return click.prompt(question, default=default_text, show_default=default_text != "", value_proc=checked)


def _config_path(config_file: str | None) -> Path:
    environ = environment()
    chosen = config_file or environ.get(str(OPTIONS["config_file"].variable))
    return Path(os.path.expanduser(chosen)) if chosen else default_file_path(environ)


def _existing(path: Path) -> dict[str, Value]:
    """Return what the file sets; raise for a file of `accelerate config`, which `config update` converts."""
    if not path.exists():
        return {}
    reading: ConfigFile = parse_config_file(read_file(path), str(path))
    if reading.foreign:
        raise ConfigError(
            f"The file {path} is one of `accelerate config`.\nConvert it first: slipstream config update --config_file {path}"
        )
    return {name: choice.value for name, choice in reading.choices.items()}


def _with_settings(existing: Mapping[str, Value], settings: Iterable[str]) -> dict[str, Value]:
    """Return the existing values with `name=value` settings applied; an empty value removes the option."""
    values = dict(existing)
    given: set[str] = set()
    for setting in settings:
        typed, equals, text = setting.partition("=")
        name = typed.strip().replace("-", "_")
        if not equals:
            raise ConfigError(f"--set {setting} has no = in it.\nWrite --set name=value, for example --set num_processes=2")
        option = OPTIONS.get(name)
        if option is None or not option.in_file:
            raise unknown_name(name, Origin("file", f"--set: {name}"))
        if name in given:
            raise ConfigError(f"--set {name} is given twice.\nKeep one of them.")
        given.add(name)
        values[name] = parse(option, text.strip(), _SETTING) if text.strip() else None
    origins = {name: _SETTING if name in given else Origin("file", "the file") for name in values}
    _check({name: Choice(value, origins[name]) for name, value in values.items() if value is not None})
    return values


def _announce(path: Path) -> None:
    """Print which file is about to be written."""
    click.echo(f"This writes {path} (--config_file FILE chooses another place).")


def _report(written: Path) -> None:
    click.echo(f"Wrote {written}.")
    if written == default_file_path(environment()):
        click.echo("`slipstream launch` reads it by itself.")
    else:
        click.echo(f"Use it with: slipstream launch --config_file {written} script.py")
