"""Measure the features of a run: k-NN, linear probes, retrieval, zero-shot. Start at `evaluate.evaluate`."""
