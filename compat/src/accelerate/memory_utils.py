"""The older path of `accelerate.utils.memory`."""

import warnings

from accelerate._forwarding import forward_names

__all__, __getattr__, __dir__ = forward_names(
    __name__, {"accelerate.utils.memory": "find_executable_batch_size release_memory should_reduce_batch_size"}
)
warnings.warn("accelerate.memory_utils is an older path: import from accelerate.utils.memory", FutureWarning, stacklevel=2)
