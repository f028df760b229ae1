"""How good a run's features are: k-NN, linear probes, retrieval, zero-shot. Start at `evaluate.evaluate`."""
