"""Lightning on Slipstream: strategies for `lightning.pytorch.Trainer` and `lightning.Fabric`.

    import slipstream.integrations.lightning                     # registers the names
    Trainer(strategy="slipstream", devices=2, accelerator="cpu")

Lightning has no entry points for strategies, so its names are registered when this module is imported. `SlipstreamStrategy` is for the
Trainer and `SlipstreamFabricStrategy` for Fabric; both are of the package `lightning`. The packages `pytorch_lightning` and
`lightning_fabric` are copies with classes of their own, which accept no strategies but theirs.
"""

from __future__ import annotations

try:
    import lightning as _lightning  # noqa: F401 - to say what is missing
except ImportError as error:
    raise ImportError(
        "slipstream.integrations.lightning needs the package lightning (it was tested with 2.6.6), which cannot be imported here: "
        f"pip install lightning==2.6.6 (pytorch_lightning or lightning_fabric alone is not enough). The reason was: {error}"
    ) from error

from lightning.fabric.strategies import STRATEGY_REGISTRY
from lightning.pytorch.strategies import StrategyRegistry

from slipstream.integrations.lightning.fabric import SlipstreamFabricStrategy
from slipstream.integrations.lightning.trainer import SlipstreamStrategy

__all__ = ["SlipstreamFabricStrategy", "SlipstreamStrategy"]

SlipstreamStrategy.register_strategies(StrategyRegistry)
SlipstreamFabricStrategy.register_strategies(STRATEGY_REGISTRY)
