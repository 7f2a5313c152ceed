"""How much memory a model takes: weights, gradients, optimizer states, activations and cache, before anything is allocated.

`kinds.py` says what a number of each type takes, `parts.py` what a model consists of, `headers.py` reads that from files without torch,
`building.py` makes a model without memory, `measure.py` runs it without memory, `formula.py` does the same by hand for known
architectures, `report.py` puts it together. Nothing here loads a weight.
"""
