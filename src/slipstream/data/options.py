"""What a loader is prepared with: the user's `DataLoaderConfiguration`, the `DataRank` of this process, and all of it as `LoaderSettings`.

Values are checked when the configuration is made and again when a loader is prepared, as fields can be set in between. The module is
small so that an Accelerator can be made without importing the loaders.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from slipstream.config.handlers import KwargsHandler, check_count
from slipstream.distributed.gradient_state import GradientState
from slipstream.distributed.guard import Channel, Limits
from slipstream.errors import ConfigError

__all__ = ["DataLoaderConfiguration", "DataRank", "LoaderSettings"]


_SWITCHES = ("split_batches", "even_batches", "non_blocking", "use_stateful_dataloader")
_OPTIONAL_SWITCHES = ("dispatch_batches", "use_seedable_sampler")
"""These may be None as well."""


@dataclass
class DataLoaderConfiguration(KwargsHandler):
    """How the loaders given to `prepare` are shared between processes; read each time that one is prepared.

    >>> DataLoaderConfiguration(even_batches=True).to_kwargs()
    {'even_batches': True}
    """

    split_batches: bool = False
    """Whether the script's batch size is that of all processes together, rather than that of each."""
    dispatch_batches: bool | None = None
    """Whether rank 0 reads for everyone; None means no."""
    even_batches: bool = False
    """Whether a short last batch is padded with samples from the start, which then count twice, rather than shared as it is.

    All processes read the same number of batches in both cases. Without padding, a process that has no samples left repeats some with
    weight 0, so training and metrics are those of one process. With padding, all batches have one shape, which some compiled graphs need.
    """
    use_seedable_sampler: bool | None = None
    """The order is always a function of seed and epoch; False has no effect and is warned about."""
    data_seed: int | None = None
    """The seed of the order; None takes the one that the script set (`set_seed`, or that of the loader's own generator)."""
    non_blocking: bool = False
    """Whether copies to a device may overlap with what follows."""
    use_stateful_dataloader: bool = False
    """True is another name for `resume="auto"`, which is the default."""
    resume: str = "auto"
    """"auto": after a checkpoint was loaded, the next iteration over a loader continues where the checkpoint stood. "manual": the epoch
    begins anew, and `skip_first_batches` continues it."""

    def __post_init__(self) -> None:
        self.check()

    def check(self) -> None:
        """Raise for invalid values; fields can be set after the object was created."""
        for name in (*_SWITCHES, *_OPTIONAL_SWITCHES):
            value = getattr(self, name)
            if not isinstance(value, bool) and not (value is None and name in _OPTIONAL_SWITCHES):
                choices = "True, False or None" if name in _OPTIONAL_SWITCHES else "True or False"
                raise ConfigError(f"DataLoaderConfiguration({name}={value!r}): a {type(value).__name__} is not a switch; write {choices}")
        if self.resume not in ("auto", "manual"):
            raise ConfigError(
                f"DataLoaderConfiguration(resume={self.resume!r}): write resume='auto' (the default) to let the next loop over a loader "
                "continue where the checkpoint stood, or resume='manual' to begin the epoch anew and call skip_first_batches yourself"
            )
        if self.use_stateful_dataloader and self.resume == "manual":
            raise ConfigError(
                "DataLoaderConfiguration(use_stateful_dataloader=True, resume='manual'): the first lets a loader continue by itself after "
                "load_state, the second does not. Leave out one of them."
            )
        seed = self.data_seed
        if seed is not None:
            check_count(seed, f"DataLoaderConfiguration(data_seed={seed!r}): a seed is a whole number from 0; write e.g. 42", least=0)

    @property
    def resumes(self) -> bool:
        """Whether the next iteration continues at a position that was loaded."""
        return self.resume == "auto"


@dataclass(frozen=True)
class DataRank:
    """Which of the processes that share the data this one is, and how it talks to the others."""

    rank: int
    world_size: int
    channel: Callable[[], Channel]
    """Returns the channel, and opens the process group if it is not open; called only for a collective."""
    limits: Limits
    compares: bool = False
    """Whether the processes that share the data are those of the channel, and compare what they are about to read."""

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world_size:
            raise ConfigError(
                f"process_index={self.rank} and num_processes={self.world_size} were given for a loader: "
                f"the index is one of 0 to {self.world_size - 1}"
            )


@dataclass(frozen=True, kw_only=True)
class LoaderSettings:
    """What every kind of prepared loader is built with."""

    data_rank: DataRank
    config: DataLoaderConfiguration
    seed: int
    """The seed of the order, the same on all ranks."""
    gradient_state: GradientState
    device: torch.device | None = None
    put_on_device: bool = False
    effective_batch_size: int | None = None
    """Samples per update; `build_loader` derives the next two from it."""
    samples_per_rank: int | None = None
    """The batch size of one rank; None for that of the user's loader."""
    steps_per_update: int | None = None
    slice_fn: Callable[..., Any] | None = None
    """The user's function that slices batches which rank 0 reads."""
