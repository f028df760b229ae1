"""What loading costs, beside FFCV's own loader and torch's DataLoader with Pillow.

A part is a case of `cases.py`, measured by `rate.py`, or one file; every part runs in a process of its own.
"""
