"""`SlipstreamStrategy`: Lightning's `Trainer` on Slipstream's processes, replicas or shards, data and checkpoints.

The loop, its callbacks, hooks and loggers are Lightning's. The strategy opens our process group for the rank that Lightning names, wraps
the LightningModule as `prepare` would, runs backward passes watched, answers Lightning's collectives with guarded ones, shares data by
samples, and reads and writes checkpoints of both formats.
"""

from __future__ import annotations

import atexit
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from lightning.fabric.utilities.optimizer import _optimizers_to_device
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies.launchers.subprocess_script import _SubprocessScriptLauncher
from lightning.pytorch.strategies.parallel import ParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_only

from slipstream.devices import rng
from slipstream.errors import DistributedOperationException
from slipstream.integrations.lightning.checkpoints import (
    FolderContent,
    check_not_a_folder,
    gather_whole,
    is_folder_path,
    is_slipstream_folder,
    read_folder,
    shard_optimizer_state,
    write_folder,
)
from slipstream.integrations.lightning.data import LastBatch, ShardedLoader, find_global_sampler
from slipstream.integrations.lightning.precision import replace_precision
from slipstream.integrations.lightning.runtime import ForwardModule
from slipstream.integrations.lightning.signals import SignalAgreement, end_children
from slipstream.integrations.lightning.strategy_mixin import StrategyMixin

__all__ = ["SlipstreamStrategy"]


class SlipstreamStrategy(StrategyMixin, ParallelStrategy):  # type: ignore[misc]  # Lightning's classes are not checked
    """Run a `lightning.pytorch.Trainer` on Slipstream: `Trainer(strategy=SlipstreamStrategy(), devices=2, accelerator="cpu")`.

    `parallel`: "ddp" (replicas) or "fsdp" (shards, FSDP2, with `fsdp_plugin` and `parallelism_config` as an Accelerator takes them).
    `mixed_precision`: what `Trainer(precision=...)` cannot say ("fp8", or "fp16" on a CPU). `shard_data=False` leaves loaders to
    Lightning. `last_batch`: "exact", or "pad" to repeat samples as Lightning does. `checkpoint_format`: "auto" writes `.ckpt` files as
    Lightning does and paths without a suffix as folders in our format; "slipstream" or "lightning" writes all in one. `timeout`,
    `barrier_timeout`, `hang_warning` and `debug` are those of an Accelerator; other names are options of DistributedDataParallel.
    """

    host = "Trainer"

    def __init__(
        self,
        parallel: str | None = None,
        *,
        accelerator: Any = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: Any = None,
        checkpoint_io: Any = None,
        precision_plugin: Precision | None = None,
        **options: Any,
    ) -> None:
        self._begin(parallel, options)
        super().__init__(
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
        )
        self._train_loaders: list[ShardedLoader] = []
        self._random: Mapping[str, Any] | None = None
        """Random states of a checkpoint that are to be restored."""

    # -- processes ------------------------------------------------------------------------------------------------

    @property
    def is_distributed(self) -> bool:
        """True: loaders get a sampler whose order does not depend on the number of processes."""
        return True

    @property
    def precision_plugin(self) -> Precision:
        """The precision plugin: ours for mixed precision."""
        return self._precision_plugin if self._precision_plugin is not None else Precision()

    @precision_plugin.setter
    def precision_plugin(self, plugin: Precision | None) -> None:
        self._check_precision(plugin)
        self._precision_plugin = plugin

    def _configure_launcher(self) -> None:
        self._check_devices()
        if self.num_processes * self.num_nodes > 1:  # one process needs no launcher, and leaves no variables behind
            self._launcher = _SubprocessScriptLauncher(self.cluster_environment, self.num_processes, self.num_nodes)

    def set_world_ranks(self) -> None:
        """Tell Lightning's environment, and its functions for rank zero, which process this is."""
        self._name_ranks()
        rank_zero_only.rank = self.global_rank

    def setup_environment(self) -> None:
        """Set up the device and open the process group."""
        super().setup_environment()
        reset_seed()
        self.set_world_ranks()
        self.precision_plugin = self._open(self.precision_plugin, replace_precision)

    # -- the model ------------------------------------------------------------------------------------------------

    def setup(self, trainer: Any) -> None:
        """Wrap the model, then make its optimizers."""
        assert self.accelerator is not None
        self.accelerator.setup(trainer)
        fits = trainer.state.fn == TrainerFn.FITTING
        self._train_loaders = []
        model = self.lightning_module
        if fits and self._layer_sync:
            model = self._layer_sync.apply(model)
        model = self.precision_plugin.convert_module(model)
        self.model = self.runtime.prepare(model, trains=fits)
        if self.runtime.shards:  # torch's own clipping fails where some parameters are sharded and some are not
            self.precision_plugin.clip_grad_by_norm = self.runtime.clip_norm
            self.precision_plugin.clip_grad_by_value = self.runtime.clip_value
        if fits:
            self._reset_optimizers_and_schedulers()  # those of an earlier run may hold parameters that sharding has replaced
            self.setup_optimizers(trainer)
        if self.runtime.communicates:
            SignalAgreement(self.runtime, trainer).install(fits=fits)
        self.setup_precision_plugin()
        if fits:
            _optimizers_to_device(self.optimizers, self.root_device)

    def model_to_device(self) -> None:
        """Move the model to the device of this process."""
        self.model.to(self.root_device)

    def backward(self, closure_loss: torch.Tensor, optimizer: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Run Lightning's backward, watched and reduced by us."""
        plugin, module = self.precision_plugin, self.lightning_module
        self.pre_backward(closure_loss)
        closure_loss = plugin.pre_backward(closure_loss, module)
        weight = self._weight()
        loss = closure_loss if weight == 1.0 else closure_loss * weight
        self.runtime.backward(loss, partial(plugin.backward, loss, module, optimizer, *args, **kwargs))
        closure_loss = plugin.post_backward(closure_loss, module)
        self.post_backward(closure_loss)
        return closure_loss

    def _weight(self) -> float:
        loaders = self._train_loaders
        return loaders[0].weight if len(loaders) == 1 else 1.0

    def optimizer_step(self, optimizer: Any, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        """Step, after a check that gradients are averaged."""
        return super().optimizer_step(optimizer, partial(self._close_update, closure), model, **kwargs)

    def _close_update(self, closure: Callable[[], Any]) -> Any:
        result = closure()
        self.runtime.check_reduced()
        return result

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """A block of accumulation: gradients stay on each rank."""
        with self.runtime.no_sync(self.model):
            yield

    # -- data -----------------------------------------------------------------------------------------------------

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """What Lightning makes samplers of: the order of all samples where we share them, this rank's part elsewhere."""
        if self.runtime.options.shard_data and not self._trainer.predicting:
            return {"num_replicas": 1, "rank": 0}
        return {"num_replicas": self.num_nodes * self.num_processes, "rank": self.global_rank}

    @property
    def _trainer(self) -> Any:
        return self.lightning_module.trainer

    def process_dataloader(self, dataloader: Any) -> Any:
        """Share a loader that Lightning gave an order of all samples."""
        trainer = self._trainer
        if not self.runtime.options.shard_data or trainer.predicting or find_global_sampler(dataloader, self.world_size) is None:
            return dataloader
        if not trainer.training:
            return ShardedLoader(dataloader, self.global_rank, self.world_size, self._last_batch_of_evaluation)
        progress = trainer.fit_loop.epoch_loop.batch_progress
        is_over = partial(getattr, progress, "is_last_batch")
        loader = ShardedLoader(
            dataloader, self.global_rank, self.world_size, self._last_batch_of_training, is_over, self._restore_random_states
        )
        earlier = [] if trainer.fit_loop._combined_loader is None else trainer.fit_loop._combined_loader.flattened
        # those of the pass before are made anew (reload_dataloaders_every_n_epochs)
        self._train_loaders = [*(known for known in self._train_loaders if not any(known is other for other in earlier)), loader]
        return loader

    def _restore_random_states(self) -> None:
        """Go on with the random numbers of the run that a folder was saved from, once, when the first batch is read."""
        random, self._random = self._random, None
        if random is not None:
            rng.restore(random)

    def _last_batch_of_training(self) -> LastBatch:
        return "weigh" if self.runtime.options.last_batch == "exact" and len(self._train_loaders) == 1 else "pad"

    def _last_batch_of_evaluation(self) -> LastBatch:
        return "once" if self.runtime.options.last_batch == "exact" else "pad"

    # -- collectives ----------------------------------------------------------------------------------------------

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Combine a tensor over the ranks; anything else is returned as it is."""
        return self.runtime.reduce(tensor, group, reduce_op) if isinstance(tensor, torch.Tensor) else tensor

    # -- checkpoints ----------------------------------------------------------------------------------------------

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the weights; sharded ones as they are, until it is known where they go."""
        return self.runtime.components.strategy.state(self.lightning_module)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Save a folder in our format, or a file of Lightning, by the path."""
        if is_folder_path(filepath, self.runtime.options.checkpoint_format):
            self._refuse_storage_options(storage_options)
            assert self.runtime.accelerator is not None
            rest = {name: value for name, value in checkpoint.items() if name not in ("state_dict", "optimizer_states")}
            content = FolderContent(rest, {0: checkpoint["state_dict"]}, self.optimizers if "optimizer_states" in checkpoint else ())
            write_folder(self.runtime.accelerator, filepath, content, int(checkpoint.get("global_step", 0)))
            return
        if self.runtime.shards:
            checkpoint = {name: gather_whole(value, keep=self.is_global_zero) for name, value in checkpoint.items()}
        write_file = super().save_checkpoint

        def write() -> None:
            check_not_a_folder(filepath)
            write_file(checkpoint, filepath, storage_options=storage_options)

        self.runtime.run_together("save_checkpoint", write)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Return the checkpoint, of either format, with whole tensors."""
        if is_slipstream_folder(checkpoint_path):
            content = read_folder(checkpoint_path, self.global_rank)
            self._random = content.random
            states = {"optimizer_states": list(content.optimizers)} if "lr_schedulers" in content.rest else {}
            return {**content.rest, "state_dict": dict(content.weights.get(0, {})), **states}
        loaded: dict[str, Any] = super().load_checkpoint(checkpoint_path, weights_only=weights_only)
        return loaded

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load the states of optimizers, sharded as their parameters are."""
        if self.runtime.shards:
            states = [shard_optimizer_state(*pair) for pair in zip(self.optimizers, checkpoint["optimizer_states"], strict=False)]
            checkpoint = {**checkpoint, "optimizer_states": states}
        super().load_optimizer_state_dict(checkpoint)

    # -- the end --------------------------------------------------------------------------------------------------

    def on_exception(self, exception: BaseException) -> None:
        """Tell ranks that wait for this one that it has failed, and let no process that Lightning started outlive it."""
        children = getattr(self._launcher, "procs", ())
        if children:
            atexit.register(end_children, children)
        if isinstance(exception, Exception) and not isinstance(exception, DistributedOperationException) and self.runtime.communicates:
            reason = f"rank {self.global_rank} failed with {type(exception).__name__}: {exception}"
            self.runtime.components.state.runtime.abandon("trainer", reason)

    def teardown(self) -> None:
        """Unwrap the model, and leave the process group open for the next stage."""
        if isinstance(self.model, (torch.nn.parallel.DistributedDataParallel, ForwardModule)):
            self.model = self.lightning_module
        module = self.lightning_module
        if module is not None and module._trainer is not None and module._trainer.state.fn == TrainerFn.FITTING and self._layer_sync:
            self.model = self._layer_sync.revert(self.model)
        if self.runtime.accelerator is not None and self.runtime.shards:
            self.cluster_environment.teardown()
            self.precision_plugin.teardown()
            self.accelerator.teardown()
            self.checkpoint_io.teardown()
            return
        super().teardown()

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Register the names of this strategy."""
        cls._register(strategy_registry)


