"""What is applied to a model around its strategy: compilation, Local SGD, and the way back to the user's model."""
