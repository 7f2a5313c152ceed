"""The options of Slipstream: each declared once, read from every source, with the origin of each value.

    option.py            what an option is, and how text becomes a value    schema.py             the options, in frozen sections
    sources.py           environment and files (the only `os.environ`)      files.py              our configuration files, read and written
    resolve.py           constructor > flags > environment > file > default accelerate_config.py  files of `accelerate config`
    resolved_config.py   `Config`, its checks, and its way to the workers   names.py              names that are not options
    handlers.py          options that are objects (`KwargsHandler`)         redaction.py          secrets kept out of reports
    fsdp2.py             options of FSDP version 1 become those of version 2

Nothing here imports torch, click or rich, and PyYAML only when a file is read or written.
"""

from slipstream.config.names import missing_feature, unknown_flag
from slipstream.config.option import Option, Origin, flag_names, negative_flag_names
from slipstream.config.resolve import for_worker, resolve
from slipstream.config.resolved_config import Config, UnusedKey
from slipstream.config.schema import OPTIONS
from slipstream.errors import ConfigError

__all__ = [
    "OPTIONS", "Config", "ConfigError", "Option", "Origin", "UnusedKey", "flag_names", "for_worker", "missing_feature",
    "negative_flag_names", "resolve", "unknown_flag",
]
