"""The ledger: where the time of a run goes, on every rank, and what it buys in samples, tokens and floating-point operations."""
