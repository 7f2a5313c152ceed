"""Methods and attributes of `Accelerator` that belong to engines and mesh axes which are not in Slipstream.

Attributes have the value that scripts expect without the engine; methods raise an error that says what to use instead.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from accelerate._unsupported import raise_unsupported

__all__ = ["EnginesMixin"]


class EnginesMixin:
    """DeepSpeed, Megatron-LM, TransformerEngine, context parallelism and LOMO, as far as scripts ask for them."""

    deepspeed_engine_wrapped: Any = None
    deepspeed_config: Any = None
    has_lomo_optimizer = False
    delayed_fp8_autocast = False
    te_recipe_handler: Any = None
    msamp_recipe_handler: Any = None

    def _refuse_engines(self, handlers: list[Any], deepspeed: Any, several: Any, megatron: Any, tensor_parallel: Any) -> None:
        """Raise for arguments of engines that are not supported."""
        if deepspeed is not None or several is not None:
            raise_unsupported("Accelerator(deepspeed_plugin=...)", "deepspeed")
        if megatron is not None:
            raise_unsupported("Accelerator(megatron_lm_plugin=...)", "megatron")
        if tensor_parallel is not None:
            raise_unsupported("Accelerator(torch_tp_plugin=...)", "tensor_parallel")

    @property
    def deepspeed_plugin(self) -> None:
        """None: DeepSpeed is not in use."""
        return None

    @property
    def should_save_model(self) -> bool:
        """True: every process takes part in saving."""
        return True

    @property
    def tensor_parallel_rank(self) -> int:
        """0: there is no tensor parallelism."""
        return 0

    @property
    def pipeline_parallel_rank(self) -> int:
        """Raise, as Accelerate does: pipelines are for inference."""
        raise NotImplementedError("Accelerator.pipeline_parallel_rank: there is no pipeline parallelism in training")

    @property
    def context_parallel_rank(self) -> int:
        """Raise, as Accelerate does."""
        raise NotImplementedError("Accelerator.context_parallel_rank: there is no context parallelism in this version of Slipstream")

    def deepspeed_ulysses_dl_adapter(self, dl: Any, model: torch.nn.Module) -> Any:
        """Raise: sequence parallelism of DeepSpeed is not supported."""
        raise_unsupported("Accelerator.deepspeed_ulysses_dl_adapter", "deepspeed")

    def lomo_backward(self, loss: torch.Tensor, learning_rate: float) -> None:
        """Raise: LOMO optimizers are not supported."""
        raise_unsupported("Accelerator.lomo_backward", "lomo")

    def _prepare_cp(self, *args: Any) -> tuple[Any, ...]:
        """Return the objects as they are: there is no context parallelism. axolotl replaces this method."""
        return args

    def maybe_context_parallel(
        self,
        buffers: list[torch.Tensor] | None = None,
        buffer_seq_dims: list[int] | None = None,
        no_restore_buffers: set[torch.Tensor] | None = None,
    ) -> AbstractContextManager[None]:
        """A block in which sequences are cut over the ranks of a context-parallel mesh; there is none, and given buffers stay whole."""
        if buffers:
            from accelerate.logging import get_logger

            get_logger(__name__).warning_once(
                "maybe_context_parallel(buffers=...): the sequences stay whole, because no context parallelism is configured"
            )
        return nullcontext()
