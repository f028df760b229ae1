"""Findings from features: solved temperatures, what they go with, and kinds of samples."""
