"""In which number formats a model computes: the policy, autocast, the scale of the loss, float8."""
