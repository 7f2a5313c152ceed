"""Tools for testing distributed code, ours and the users': a pool of ranks on this machine, faults at a chosen rank and call, leak
checks.

The pytest fixtures are opt-in: `pytest_plugins = ["slipstream.testing.plugin"]` in a conftest.
"""

from slipstream.testing.rank_pool import DeviceUnavailable, Outcome, RankFailure, RankPool, ranks

__all__ = ["DeviceUnavailable", "Outcome", "RankFailure", "RankPool", "ranks"]
