"""What the temperatures of a run say: read from its state and its dataset, a block of rows at a time."""
