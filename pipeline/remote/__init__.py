"""Datasets in an object store, read through a local cache of packed blocks.

A block of samples is the unit of the order, of reading ahead, of the cache's limit and of eviction. Its samples are
written into one file as they come, each as its picture followed by its tokens, whether these come from a .beton, a tar
or both; `Contents` knows the ids in a block and their offsets there, 16 bytes of memory a sample. Loaders read a block
as they read a .beton or a tar: `placed` gives the file and the offsets of samples that a caller holds. A block that no
caller holds is evicted by deleting its file, so any file system will do. Samples outside a run's selection, and readers
without an order, have blocks of their own. Records stay, in .rows files that fill by pages of 4 KiB. `plan` computes
requests, `fetching` sends them, `room` enforces the limit, `schedule` orders the blocks of coming windows, `read_ahead`
fetches them, `samples` ties these together, and `files` is the dataset's interface to all of it.
"""
