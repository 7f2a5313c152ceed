"""`StrategyMixin`: what the strategies for `Trainer` and for `Fabric` share, whose base classes in Lightning are different ones.

It holds the options and the runtime, says which devices and processes there are, checks that they fit how the processes were started, and
answers the collectives that have the same names in both trees.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from slipstream.errors import ConfigError
from slipstream.integrations.lightning.options import check_precision, read_options
from slipstream.integrations.lightning.runtime import HostedRuntime

__all__ = ["StrategyMixin"]

_OWN = ("accelerator", "parallel_devices", "cluster_environment", "checkpoint_io")
_DESCRIPTION = "Slipstream's runtime: guarded collectives, data shared by samples, checkpoints that commit"


class StrategyMixin:
    """Options, processes and collectives."""

    host = ""
    """The class of Lightning that this strategy is for."""
    runtime: HostedRuntime
    parallel_devices: list[torch.device] | None
    cluster_environment: Any
    global_rank: int
    local_rank: int
    node_rank: int

    def _begin(self, parallel: str | None, options: dict[str, Any]) -> None:
        given = {**options, **({} if parallel is None else {"parallel": parallel})}
        self.runtime = HostedRuntime(read_options(type(self).__name__, given, _OWN))
        self._num_nodes = 1

    def __repr__(self) -> str:
        trains = self.host == "Trainer"
        other = "Fabric takes SlipstreamFabricStrategy" if trains else "a Trainer takes SlipstreamStrategy"
        package = "lightning.pytorch" if trains else "lightning.fabric"
        return f"<{type(self).__name__} for {package}.{self.host} of the package `lightning`, not of pytorch_lightning; {other}>"

    @classmethod
    def _register(cls, registry: Any) -> None:
        names: dict[str, dict[str, Any]] = {
            "slipstream": {},
            "slipstream_ddp": {"parallel": "ddp"},
            "slipstream_ddp_find_unused_parameters_true": {"parallel": "ddp", "find_unused_parameters": True},
            "slipstream_fsdp": {"parallel": "fsdp"},
        }
        for name, options in names.items():
            if name not in registry:
                registry.register(name, cls, description=_DESCRIPTION, **options)

    # -- processes ------------------------------------------------------------------------------------------------

    @property
    def root_device(self) -> torch.device:
        """The device of this process."""
        assert self.parallel_devices is not None
        return self.parallel_devices[self.local_rank]

    @property
    def num_nodes(self) -> int:
        """How many machines there are."""
        return self._num_nodes

    @num_nodes.setter
    def num_nodes(self, num_nodes: int) -> None:
        self._num_nodes = num_nodes

    @property
    def num_processes(self) -> int:
        """How many processes this machine has."""
        return 0 if self.parallel_devices is None else len(self.parallel_devices)

    def _check_devices(self) -> None:
        """Raise if processes were started from outside, and not as many as devices are asked for."""
        environment = self.cluster_environment
        if type(environment).__name__ == "LightningEnvironment" or not environment.creates_processes_externally:
            return
        wanted, started = self.num_processes * self.num_nodes, environment.world_size()
        if wanted != started:
            nodes = f", num_nodes={self.num_nodes}" if self.num_nodes > 1 else ""
            raise ConfigError(
                f"{self.host}(devices={self.num_processes}{nodes}) needs {wanted} processes, and {started} were started: write "
                f"{self.host}(devices={max(1, started // self.num_nodes)}{nodes}), or `slipstream launch --num_processes {wanted}`"
            )

    def _name_ranks(self) -> None:
        environment = self.cluster_environment
        if environment is not None:
            environment.set_global_rank(self.node_rank * self.num_processes + self.local_rank)
            environment.set_world_size(self.num_nodes * self.num_processes)

    def _open(self, plugin: Any, replace: Callable[[Any, str | None, str], Any]) -> Any:
        """Open the process group, and return the precision plugin that computes."""
        plugin = replace(plugin, self.runtime.options.mixed_precision, self.root_device.type)
        mixed = getattr(plugin, "mixed", None)
        mixed_precision = "no" if mixed is None else mixed.policy.mixed_precision
        self.runtime.open(self.cluster_environment, self.root_device, self.num_processes, self.num_nodes, mixed_precision)
        return plugin

    def _check_precision(self, plugin: Any) -> None:
        asked = self.runtime.options.mixed_precision
        check_precision(type(self).__name__, asked, self.host, str(getattr(plugin, "precision", "32-true")))

    def _refuse_storage_options(self, storage_options: Any) -> None:
        if storage_options is not None:
            raise ConfigError(
                "save_checkpoint(storage_options=...) is for a CheckpointIO of Lightning, and this checkpoint is a folder in Slipstream's "
                "format: leave it out, or write a path that ends in .ckpt"
            )

    # -- collectives ----------------------------------------------------------------------------------------------

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        """Wait for all ranks."""
        self.runtime.barrier()

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Return the object of one rank on all of them."""
        return self.runtime.broadcast(obj, src)

    def all_gather(self, tensor: torch.Tensor, group: Any = None, sync_grads: bool = False) -> torch.Tensor:
        """Return the tensors of all ranks, stacked."""
        return self.runtime.all_gather(tensor, group, sync_grads)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Return whether all ranks decided so; with `all=False`, whether any did."""
        return self.runtime.decide(decision, all_ranks=all)


