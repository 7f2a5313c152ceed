"""The `Accelerator` class, by subject: `accelerator.py` joins the components, the other files hold methods that delegate."""

from __future__ import annotations

from slipstream.accelerator.accelerator import Accelerator

__all__ = ["Accelerator"]
