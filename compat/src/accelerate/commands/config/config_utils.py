"""Asking questions in a terminal: a line of text, or a choice from a numbered list."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import Any

from accelerate._enumerations import ComputeEnvironment, SageMakerDistributedType
from accelerate.commands._launch_arguments import DYNAMO_BACKENDS
from slipstream.devices.table import DistributedType

__all__ = ["DYNAMO_BACKENDS", "SubcommandHelpFormatter"]

_MACHINES = (
    *("NO", "MULTI_CPU", "MULTI_XPU", "MULTI_HPU", "MULTI_GPU", "MULTI_NPU", "MULTI_MLU", "MULTI_SDAA", "MULTI_MUSA", "MULTI_NEURON"),
    "XLA",
)
"""The kinds of machine in the order in which the questionnaire lists them."""


def _ask_field(
    input_text: str, convert_value: Callable[[str], Any] | None = None, default: Any = None, error_message: str | None = None
) -> Any:
    """Ask until the answer can be converted; an empty answer is the default, if there is one."""
    while True:
        try:
            answer = input(input_text)
        except EOFError:
            from slipstream.errors import ConfigError

            raise ConfigError(
                "config: there are no more answers on the standard input, and nothing was written. "
                "Run it in a terminal, or write a file without questions: `accelerate config default`."
            ) from None
        if answer == "" and default is not None:
            return default
        try:
            return convert_value(answer) if convert_value is not None else answer
        except Exception:
            if error_message is not None:
                print(error_message)


def _ask_options(
    input_text: str, options: Sequence[str] = (), convert_value: Callable[[Any], Any] | None = None, default: int = 0
) -> Any:
    """Ask for one of some options, by its number or its name; an empty answer is the default."""
    print(input_text)
    for number, option in enumerate(options):
        print(f"  {'*' if number == default else ' '} {number}: {option}")

    def chosen(answer: str) -> int:
        names = [option.lower() for option in options]
        number = names.index(answer.strip().lower()) if answer.strip().lower() in names else int(answer)
        return range(len(options))[number]

    number = _ask_field(
        f"Number or name [{options[default]}]: ", chosen, default=default, error_message=f"Give a number from 0 to {len(options) - 1}."
    )
    return convert_value(number) if convert_value is not None else number


def _convert_compute_environment(value: Any) -> ComputeEnvironment:
    return list(ComputeEnvironment)[int(value)]


def _convert_distributed_mode(value: Any) -> DistributedType:
    return DistributedType(_MACHINES[int(value)])


def _convert_dynamo_backend(value: Any) -> str:
    return DYNAMO_BACKENDS[int(value)]


def _convert_mixed_precision(value: Any) -> Any:
    from accelerate.utils.dataclasses import PrecisionType

    return PrecisionType(["no", "fp16", "bf16", "fp8"][int(value)])


def _convert_sagemaker_distributed_mode(value: Any) -> SageMakerDistributedType:
    return list(SageMakerDistributedType)[int(value)]


def _convert_fp8_backend(value: Any) -> Any:
    from accelerate.utils.dataclasses import FP8BackendType

    return FP8BackendType(["AO", "TE", "MSAMP"][int(value)])


def _convert_yes_no_to_bool(value: str) -> bool:
    return {"yes": True, "no": False, "y": True, "n": False}[value.strip().lower()]


class SubcommandHelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Leaves the line of all options out of the help of a subcommand."""

    def _format_usage(self, usage: Any, actions: Any, groups: Any, prefix: Any) -> str:
        return super()._format_usage(usage, actions, groups, prefix).replace("<command> [<args>] ", "")
