"""Names of `accelerate.utils.versions`."""

from __future__ import annotations

from typing import Any

from accelerate._forwarding import forward_names

_forwarded, _find, __dir__ = forward_names(
    __name__,
    {
        "accelerate.utils.constants": "STR_OPERATION_TO_FUNC",
        "slipstream.utils": "compare_versions is_torch_version",
    },
)
__all__ = _forwarded


def __getattr__(name: str) -> Any:
    if name == "torch_version":
        from importlib.metadata import version

        from packaging.version import parse

        return parse(version("torch"))
    return _find(name)
