"""What a model weighs and where its parts go: sizes, ties, budgets, and device maps as a packing problem. No tensor is touched."""
