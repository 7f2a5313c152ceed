"""Names of `accelerate.utils.torch_xla`: this version of Slipstream does not run on torch_xla."""

from __future__ import annotations

from accelerate._unsupported import placeholders

_placeholders = placeholders(__name__, "torch_xla", functions="install_xla")
globals().update(_placeholders)
__all__ = sorted(_placeholders)
