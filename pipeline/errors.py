"""What can go wrong with data, grouped by what a caller would do about it."""


class DatasetError(Exception):
    """A dataset directory is missing, incomplete, of another format, or not what the caller expected."""


class DatasetExistsError(DatasetError):
    """The directory to write is there already; nothing was touched."""


class SourceError(Exception):
    """What the user asked to convert cannot be read at all, or holds no usable sample."""


class BadSampleError(Exception):
    """One sample cannot be converted; the message says why. The conversion goes on without it."""
