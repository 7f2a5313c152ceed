"""Who runs the step: one process, or replicas that average their gradients."""
