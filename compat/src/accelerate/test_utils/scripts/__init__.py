"""Scripts that check the runtime; `accelerate test` runs `test_script`."""
