"""Which samples have the same picture."""
