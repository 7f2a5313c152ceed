"""Strategies: who runs the step.

One process, or replicas that average their gradients.
"""
