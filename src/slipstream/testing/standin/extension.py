"""Load the C++ extension of the stand-in device, and configure it from the environment: how many devices, with how much memory."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sys
from typing import Any

from slipstream.config.sources import environment
from slipstream.devices.table import family_of
from slipstream.errors import ConfigError
from slipstream.testing.standin.build import StandinUnavailable, extension_file

__all__ = ["load_extension"]

_EXTENSION = "slipstream_standin"
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
    family = family_of("standin")
    total = family.total(variables)
    if total > _MOST_DEVICES:
        raise ConfigError(f"SLIPSTREAM_STANDIN_DEVICES={total}: there can be 1 to {_MOST_DEVICES} stand-in devices; write one of these")
    memory = variables.get("SLIPSTREAM_STANDIN_MEMORY") or str(_DEFAULT_MEMORY)
    if not memory.isdecimal():
        raise ConfigError(f"SLIPSTREAM_STANDIN_MEMORY={memory!r} is not a whole number of bytes; write e.g. {_DEFAULT_MEMORY}")
    return family.count_files(variables), int(memory)
