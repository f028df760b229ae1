"""A run's own measurements: metrics.jsonl, its times, and hints derived from them."""
