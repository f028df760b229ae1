"""Augmented views of a picture, drawn and computed the same way by both loaders."""
