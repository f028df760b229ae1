"""Optimisation state for every sample: one row each, in RAM during training and in an icechunk repository on disk.

`store.StateStore` is the only writer. What reads, `reader` and `durable`, works at any time and does not import torch.
"""
