"""Open a run, and read its state piece by piece."""
