"""Measurements that are not installed. Run one from a checkout: python -m benchmarks.state."""
