"""The order of samples: a pure function of seed, epoch and step."""
