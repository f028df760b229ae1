"""What torch.compile leaves out of its graphs."""

from torch._compile import _disable_dynamo

uncompiled = _disable_dynamo
"""Decorates a function as torch.compiler.disable does, which imports the compiler at once: that takes longer than torch
itself. This one, which torch's optimisers use, waits for the first call.
"""
