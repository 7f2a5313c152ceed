"""What happens around the forward of a module: hooks, stand-ins for weights that are away, and their exchange for the weights."""
