"""A run: its directory, what it is built of, how it begins and is resumed."""
