"""A dataset becomes batches of views, in our order, by one of two decoders."""
