"""Strategies: who runs the step.

One process, replicas that average their gradients, or shards of one model.
"""
