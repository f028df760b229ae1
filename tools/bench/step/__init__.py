"""What the trainer's step costs beyond its computation, and how long a checkpoint holds it up.

A part has its own process; `sizes.py` says how much it measures. The trainer is the real one, whose `run` is given
batches that lie in memory; what else is measured goes on while it waits for one.
"""
