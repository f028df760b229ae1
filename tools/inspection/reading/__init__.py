"""Open a run, or what it predicts for another dataset, and read its state piece by piece."""
