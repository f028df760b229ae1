"""Sees which threads call a function."""

import threading


def watch(monkeypatch, functions):
    """Watch (owner, name) each. Returns name -> the threads that called it, filled as they do."""
    threads = {}

    def watched(name, work):
        def call(*given, **options):
            threads.setdefault(name, set()).add(threading.current_thread())
            return work(*given, **options)

        return call

    for owner, name in functions:
        monkeypatch.setattr(owner, name, watched(name, getattr(owner, name)))
    return threads
