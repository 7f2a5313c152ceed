"""What is applied to a model around its strategy: the mesh, the blocks that are sharded, compilation, Local SGD, and the way back."""
