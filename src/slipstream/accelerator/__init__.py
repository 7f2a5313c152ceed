"""The `Accelerator` class, by subject: `accelerator.py` joins the parts, the other files hold methods that delegate to their owners."""

from __future__ import annotations

from slipstream.accelerator.accelerator import Accelerator

__all__ = ["Accelerator"]
