"""What features say of the temperatures of a run."""
