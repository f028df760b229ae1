"""The files of checkpoints, and the host copies from which they are written."""
