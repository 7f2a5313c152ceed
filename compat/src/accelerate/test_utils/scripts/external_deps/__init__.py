"""Scripts that need other packages than this one."""
