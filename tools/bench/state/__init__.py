"""What the state store costs, each figure side by side with what a user would pick instead.

A part is one file with `measure(sizes, directory)`; `sizes.py` says how much each measures. Every part runs in a
process of its own, so that its peak memory is its alone.
"""
