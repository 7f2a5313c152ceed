"""Which number format is used for what: the policy of a precision, as a record that can be printed and compared with what ran.

    param     the format of the parameters, and so of their gradients
    compute   the format that autocast gives to what gains from it (matrix products, convolutions); sums and norms stay in float32
    reduce    the format in which gradients are added up between processes
    output    the format that a model's outputs are cast to; None: they stay as they were computed

Where autocast computes, outputs are cast to float32 by default: a loss that is computed from them outside of the model is a float32
number then. In bfloat16 it would have three digits (7.125 for 7.1142), and curves and early stopping would move in stairs.
`outputs_to_fp32=False` leaves outputs as they were computed and saves the copy; without autocast they stay as they are unless
`outputs_to_fp32=True` is given.

What this promises: a precision that the device cannot do, or that would not do what it says with these parameters, is an error or a
warning at `prepare`. It never becomes another precision by itself.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections import Counter
from dataclasses import dataclass

import torch

from slipstream.devices.packages import installed
from slipstream.devices.table import CPU, family_of, is_fp16_available
from slipstream.errors import ConfigError
from slipstream.precision.options import PrecisionType

__all__ = ["Policy", "check_device", "check_parameters", "policy_for"]

_AUTOCAST_TO = {"no": None, "fp16": torch.float16, "bf16": torch.bfloat16, "fp8": torch.bfloat16}


@dataclass(frozen=True)
class Policy:
    """The formats of one precision; made by `policy_for`.

    >>> print(policy_for("bf16"))
    bf16: parameters float32, compute bfloat16, gradients reduced in float32, outputs cast to float32
    """

    param: torch.dtype
    compute: torch.dtype
    reduce: torch.dtype
    output: torch.dtype | None = None
    mixed_precision: str = "no"
    autocast: bool = True
    """False: autocast was turned off by the user (`AutocastKwargs(enabled=False)`)."""

    @property
    def autocast_dtype(self) -> torch.dtype | None:
        """What autocast casts to; None where there is none to install."""
        return _AUTOCAST_TO[self.mixed_precision]

    def for_model(self, model: torch.nn.Module) -> Policy:
        """The policy as it is for a model, whose parameters may have been loaded in another format.

        >>> print(policy_for("no").for_model(torch.nn.Linear(2, 2, dtype=torch.bfloat16)))
        no: parameters bfloat16, compute bfloat16, gradients reduced in bfloat16, outputs as computed
        """
        counts: Counter[torch.dtype] = Counter()
        for parameter in model.parameters():
            if parameter.is_floating_point():
                counts[parameter.dtype] += parameter.numel()
        if not counts:
            return self
        param = counts.most_common(1)[0][0]
        # Autocast leaves float64 alone.
        casts = self.autocast and self.autocast_dtype is not None and param is not torch.float64
        reduce = param if self.reduce is self.param else self.reduce
        return dataclasses.replace(self, param=param, compute=self.compute if casts else param, reduce=reduce)

    def __str__(self) -> str:
        compute = _name(self.compute)
        if self.mixed_precision == "fp8":
            compute = f"float8 in converted linear layers and {compute} elsewhere"
        elif self.mixed_precision != "no" and not self.autocast:
            compute += " (autocast is turned off)"
        outputs = "as computed" if self.output is None else f"cast to {_name(self.output)}"
        return (
            f"{self.mixed_precision}: parameters {_name(self.param)}, compute {compute}, "
            f"gradients reduced in {_name(self.reduce)}, outputs {outputs}"
        )


def policy_for(
    mixed_precision: str,
    *,
    outputs_to_fp32: bool | None = None,
    param: torch.dtype = torch.float32,
    reduce: torch.dtype | None = None,
    autocast: bool = True,
) -> Policy:
    """The policy of a value of `mixed_precision`; give `reduce` where a communication hook sends gradients in another format.

    `outputs_to_fp32`: None casts outputs where the precision is a mixed one.

    >>> policy_for("fp16").output, policy_for("fp16", outputs_to_fp32=False).output, policy_for("no").output
    (torch.float32, None, None)
    """
    name = str(getattr(mixed_precision, "value", mixed_precision)).lower()
    if name not in PrecisionType:
        raise ConfigError(f"mixed_precision={mixed_precision!r} is not known; write one of {', '.join(PrecisionType.list())}")
    target = _AUTOCAST_TO[name]
    return Policy(
        param=param,
        compute=target if target is not None and autocast else param,
        reduce=param if reduce is None else reduce,
        output=torch.float32 if (target is not None if outputs_to_fp32 is None else outputs_to_fp32) else None,
        mixed_precision=name,
        autocast=autocast,
    )


def check_device(mixed_precision: str, device_type: str) -> None:
    """Refuses a precision that this kind of device cannot compute in, or whose package is not installed.

    >>> check_device("bf16", "cpu")
    """
    if mixed_precision == "no":
        return
    why = _why_not(mixed_precision, device_type)
    if why is not None:
        raise ConfigError(
            f"mixed_precision={mixed_precision!r} cannot be used on {device_type}: {why}. "
            "Write mixed_precision='no', or choose another device."
        )
    if mixed_precision == "fp8" and not installed("torchao", minimum="0.9"):
        raise ConfigError(
            "mixed_precision='fp8' runs through torchao (0.9 or later), which is not installed: "
            "pip install 'slipstream[fp8]', or write mixed_precision='bf16'"
        )


def _why_not(mixed_precision: str, device_type: str) -> str | None:
    if not torch.amp.is_autocast_available(device_type):
        return "torch has no autocast for it"
    family = family_of(device_type)
    if mixed_precision in ("bf16", "fp8") and not family.bf16(family.module()):
        return "it does not compute in bfloat16"
    if mixed_precision == "fp16" and family.type != CPU.type and not is_fp16_available():
        return "it does not compute in float16"
    return None


def check_parameters(policy: Policy, model: torch.nn.Module, *, scales: bool) -> None:
    """Refuses parameters that cannot be trained under the policy, and warns of those on which it has no effect.

    `scales` says whether the loss is scaled: gradients in float16 cannot be unscaled without overflow, so parameters that are trained
    have to be in a wider format. Parameters without gradients may be in any.
    """
    for name, parameter in model.named_parameters():
        if scales and parameter.dtype is torch.float16 and parameter.requires_grad:
            raise ConfigError(
                f"parameter {name} of {type(model).__name__} is float16, and mixed_precision='fp16' scales the loss: its gradient would "
                "overflow, and updates smaller than a thousandth of a weight would be lost. Load the model in float32 (model.float()); "
                "autocast computes in float16 all the same. To keep float16 weights, write mixed_precision='no'."
            )
    if policy.autocast_dtype is not None and policy.for_model(model).param is torch.float64:
        warnings.warn(
            f"mixed_precision={policy.mixed_precision!r} has no effect on {type(model).__name__}: its parameters are float64, which "
            "autocast leaves alone. Call model.float() before prepare, or write mixed_precision='no'.",
            stacklevel=2,
        )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
