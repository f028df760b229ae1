"""A run: its directory, its parts, its start and its resume."""
