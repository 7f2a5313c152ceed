"""Timing, guards, profiler, memory snapshots, trackers, the run directory and the report.

`report/` and `run_dir/` import no torch. This file imports nothing, so that a part costs only itself.
"""
