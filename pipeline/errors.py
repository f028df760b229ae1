"""Data errors, grouped by what a caller would do about them."""


class DatasetError(Exception):
    """A dataset directory is missing, incomplete, has an unknown format, or is not what the caller expected."""


class DatasetExistsError(DatasetError):
    """The output directory already exists; nothing was changed."""


class SourceError(Exception):
    """The source cannot be read at all, or has no usable sample."""


class SourceChangedError(SourceError):
    """A file of the source, the argument, is not the one that the conversion began with."""

    def __str__(self) -> str:
        return f"{self.args[0]} was changed after the conversion began; start it over"


class BadSampleError(Exception):
    """One sample cannot be converted; the message says why. The conversion continues without it."""
