"""The parts of `Accelerator`: what it is made of, and its methods by subject. Each method delegates to the room that owns its meaning."""
