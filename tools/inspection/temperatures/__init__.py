"""Figures from the state: distributions, groups, kinds, and their changes over the run."""
