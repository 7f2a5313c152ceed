"""The commands of `slipstream`, one file each, imported only when used.

Nothing here imports torch at import time.
"""
