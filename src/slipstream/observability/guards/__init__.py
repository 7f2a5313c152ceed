"""Checks that watch a run and report what goes wrong; `monitor.py` attaches them to an Accelerator."""
