"""What `slipstream env` and `slipstream doctor` stand on: facts about this machine, judgements of them, and secrets kept out."""
