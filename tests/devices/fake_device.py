"""A device without memory: its tensors are fake ones of torch, those of the host are real.

Under `FakeDevice`, operations on host tensors compute as ever. An operation that touches the device returns a fake tensor: shape, dtype and
device are those that the operation gives on a GPU, and mixing devices raises as it does there. Reading a value (`item()`) is noted with the
functions that asked, and gives 0 or True: on a GPU the host would wait.
"""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._pytree import tree_leaves

_READS = frozenset({torch.ops.aten._local_scalar_dense.default, torch.ops.aten.equal.default, torch.ops.aten.is_nonzero.default})


class FakeDevice(FakeTensorMode):
    """Makes tensors of one device type fake, and leaves those of the host alone."""

    avoid_device_init = True

    def __init__(self, kind: str) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self.kind = kind
        self.reads: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        leaves = tree_leaves((args, kwargs or {}))
        if not any(isinstance(leaf, FakeTensor) or (isinstance(leaf, torch.device) and leaf.type == self.kind) for leaf in leaves):
            return func(*args, **(kwargs or {}))
        if func in _READS:
            frames = traceback.extract_stack()[-9:-3]  # without this function and the two of torch around it
            self.reads.append(" < ".join(f"{frame.name} ({frame.filename.rpartition('/')[2]})" for frame in reversed(frames)))
            is_number = func is torch.ops.aten._local_scalar_dense.default and args[0].dtype is not torch.bool
            return (0.0 if args[0].dtype.is_floating_point else 0) if is_number else True
        return super().__torch_dispatch__(func, types, args, kwargs)

    def swap_tensors(self, function: Callable[[Any, Any], None], one: Any, other: Any) -> None:
        """Swap two tensors; what this mode remembers of them would prevent it."""
        converter: Any = self.fake_tensor_converter.meta_converter
        converter.tensor_memo.clear()
        converter.describer.lookup_tensor.clear()
        function(one, other)


@contextlib.contextmanager
def fake_device(kind: str, *, count: int = 2, current: int = 0) -> Iterator[FakeDevice]:
    """Let torch and Slipstream see `count` devices of a type, whose tensors are fake."""
    namespace, device, swap = getattr(torch, kind), FakeDevice(kind), torch.utils.swap_tensors
    answers: dict[str, Callable[..., Any]] = {
        "is_available": lambda: True,
        "device_count": lambda: count,
        "current_device": lambda: current,
        "set_device": lambda _: None,
        "is_bf16_supported": lambda including_emulation=True: True,
    }
    with contextlib.ExitStack() as stack:
        for name, answer in answers.items():
            stack.enter_context(patch.object(namespace, name, answer))
        # `module.to()` keeps its parameters on a GPU; with fake tensors it does so by swapping.
        stack.enter_context(patch.object(torch.utils, "swap_tensors", lambda one, other: device.swap_tensors(swap, one, other)))
        stack.callback(torch.__future__.set_swap_module_params_on_conversion, torch.__future__.get_swap_module_params_on_conversion())
        torch.__future__.set_swap_module_params_on_conversion(True)
        stack.enter_context(device)
        yield device
