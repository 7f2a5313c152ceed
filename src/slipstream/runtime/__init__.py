"""Processes, their group and their turns: who this process is, and how it meets the others."""
