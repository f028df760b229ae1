"""A source of samples becomes a dataset directory. Start at `convert.convert`."""
