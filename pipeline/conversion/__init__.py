"""Convert a source of samples to a dataset directory. Start at `convert.convert`."""
