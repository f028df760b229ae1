"""Data errors, grouped by what a caller would do about them."""

CURE = "Convert the dataset again."
"""What the message of a damaged dataset ends with."""


class DatasetError(Exception):
    """A dataset directory is missing, incomplete, of unknown format, or not the expected one."""


class DatasetExistsError(DatasetError):
    """The output directory already exists; nothing was changed."""


class SourceError(Exception):
    """The source cannot be read at all, or has no usable sample."""


class SourceChangedError(SourceError):
    """A file of the source, the argument, has changed since the conversion began."""

    def __str__(self) -> str:
        return f"{self.args[0]} was changed after the conversion began; start it over"


class BadSampleError(Exception):
    """One sample cannot be converted; the message says why. The conversion continues without it."""
