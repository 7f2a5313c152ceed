"""Migration of scripts to Slipstream, from Accelerate, hand-written DDP, or DeepSpeed's launcher.

`migration.migrate_text` takes the text of a script and returns the new text with a reason for each change, and notes on what is left to
do by hand. The rules read the syntax tree and change the text at its positions; nothing is imported, run or reformatted.
"""
