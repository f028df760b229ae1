"""Turn a dataset into batches of views, in the sample order, with one of two decoders."""
