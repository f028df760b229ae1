"""Analyse the temperatures of a run from its state and its dataset, one block of rows at a time."""
