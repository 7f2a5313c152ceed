"""Load the C++ extension of the stand-in device, and configure it from the environment: how many devices, with how much memory."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sys
from typing import Any

from slipstream.config.sources import environment
from slipstream.devices.table import visible_count
from slipstream.errors import ConfigError
from slipstream.testing.standin.build import StandinUnavailable, extension_file

__all__ = ["load_extension"]

_EXTENSION = "slipstream_standin"
_DEFAULT_DEVICES = 4
_MOST_DEVICES = 16  # MAX_DEVICES of csrc/device.h
_DEFAULT_MEMORY = 4 * 2**30


def load_extension() -> Any:
    """Return the loaded extension."""
    if _EXTENSION in sys.modules:
        return sys.modules[_EXTENSION]
    file = extension_file()
    loader = importlib.machinery.ExtensionFileLoader(_EXTENSION, str(file))
    spec = importlib.util.spec_from_file_location(_EXTENSION, file, loader=loader)
    assert spec is not None
    try:
        module = importlib.util.module_from_spec(spec)
        loader.exec_module(module)
    except ImportError as error:
        raise StandinUnavailable(
            f"the stand-in device was built but does not load ({error}); delete {file.parent} to build it again"
        ) from error
    module.configure(*_settings())
    sys.modules[_EXTENSION] = module
    return module


def _settings() -> tuple[int, int]:
    """Return the number of devices and their capacity in bytes, as the environment has them."""
    variables = environment()
    devices = _number(variables.get("SLIPSTREAM_STANDIN_DEVICES"), "SLIPSTREAM_STANDIN_DEVICES", _DEFAULT_DEVICES)
    if devices > _MOST_DEVICES:
        raise ConfigError(f"SLIPSTREAM_STANDIN_DEVICES={devices}: there can be 1 to {_MOST_DEVICES} stand-in devices; write one of these")
    if (visible := variables.get("STANDIN_VISIBLE_DEVICES")) is not None:
        devices = min(devices, visible_count(visible))
    return devices, _number(variables.get("SLIPSTREAM_STANDIN_MEMORY"), "SLIPSTREAM_STANDIN_MEMORY", _DEFAULT_MEMORY)


def _number(text: str | None, name: str, default: int) -> int:
    if not text:
        return default
    if not text.isdigit():
        raise ConfigError(f"{name}={text!r} is not a whole number; write e.g. {name}={default}")
    return int(text)
