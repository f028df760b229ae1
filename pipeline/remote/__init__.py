"""Datasets in an object store, read through a local cache.

The cache is a folder with files of the dataset's names. Those of pixels and tokens are sparse: they have their full
size and hold the ranges fetched so far, so that all readers work on them unchanged. `plan` says which ranges,
`presence` knows what is there, `fetching` gets it, `room` keeps it within a limit, `schedule` knows what coming windows
need, `read_ahead` has it fetched, and `files` is what a dataset sees of all this.
"""
