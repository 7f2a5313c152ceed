"""Where the time of a run goes, on every rank, and the throughput (the ledger).

The path of a step is meter, step_times, report, ledger.
"""
