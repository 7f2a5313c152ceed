"""Tools for testing distributed code, ours and the users': ranks on this machine, faults at a chosen rank and call, leak checks.

The pytest fixtures are opt-in: `pytest_plugins = ["slipstream.testing.plugin"]` in a conftest.
"""

from slipstream.testing.outcome import Outcome, RankFailure
from slipstream.testing.ranks import RankPool, ranks

__all__ = ["Outcome", "RankFailure", "RankPool", "ranks"]
