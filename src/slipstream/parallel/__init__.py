"""What is applied to a model around its strategy: compilation, and the way back to the user's own model."""
