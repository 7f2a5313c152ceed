"""Files of other libraries, read as data: nothing in them is ever run.

`archive.py` finds the parts of a file that `torch.save` wrote, `opcodes.py` takes its pickle apart without obeying it,
`values.py` makes values of a fixed list of kinds out of that.
"""
