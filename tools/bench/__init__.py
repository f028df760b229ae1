"""Measure a user's machine: how fast it loads images, and the cost of a training step."""
