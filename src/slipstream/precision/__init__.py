"""Mixed precision: the policy of dtypes, autocast, the loss scaler, FP8."""
