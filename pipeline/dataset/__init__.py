"""A dataset on disk, as a conversion writes it: index, table of samples, and bytes. See docs/formats.md."""
