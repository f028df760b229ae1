"""Samples with the same picture."""
