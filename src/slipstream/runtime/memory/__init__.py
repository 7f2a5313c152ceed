"""Which tensors take the memory of this process: looked at when somebody asks, and when it has run out."""
