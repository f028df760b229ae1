"""Datasets in an object store, read through a local cache.

The cache is a folder with files of the dataset's names. Files of pixels and tokens are sparse: they have their full
size and hold the ranges fetched so far, so all readers work on them unchanged; so are the tars of a dataset in place.
`plan` computes ranges, `presence` records the ranges held, `fetching` downloads, `pages` writes and frees, `room`
enforces a limit, `schedule` orders the blocks of coming windows, `read_ahead` fetches them, and `files` is the
dataset's interface to all of this.
"""
