"""Python imports this where a test starts it, since the tests' folder is in its path."""

import support.torchvision_operators  # noqa: F401
