"""`DataLoaderConfiguration`: how loaders are prepared."""

from __future__ import annotations

from dataclasses import dataclass

from slipstream.config.handlers import KwargsHandler

__all__ = ["DataLoaderConfiguration"]


@dataclass
class DataLoaderConfiguration(KwargsHandler):
    """How the loaders given to `prepare` are shared between processes; read each time that one is prepared.

    >>> DataLoaderConfiguration(even_batches=False).to_kwargs()
    {'even_batches': False}
    """

    split_batches: bool = False
    """Whether the script's batch size is that of all processes together, rather than that of each."""
    dispatch_batches: bool | None = None
    """Whether rank 0 reads for everyone; None means no."""
    even_batches: bool = True
    """Whether a short last batch is completed with samples from the start, rather than shared out as it is (gradients stay exact)."""
    use_seedable_sampler: bool | None = None
    """The order is always a function of seed and epoch; False has no effect and is warned about."""
    data_seed: int | None = None
    """The seed of the order; None takes the one that the script set (`set_seed`, or that of the loader's own generator)."""
    non_blocking: bool = False
    """Whether copies to a device may overlap with what follows."""
    use_stateful_dataloader: bool = False
    """Whether a loaded checkpoint lets the next iteration go on where the saved one stood; else `skip_first_batches` does."""
