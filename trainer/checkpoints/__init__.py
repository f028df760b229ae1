"""The files of checkpoints, and the copies on the host that they are written from."""
