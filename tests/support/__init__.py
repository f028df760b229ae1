"""Helpers that several tests share. `programs` are started as processes of their own, by their path."""
