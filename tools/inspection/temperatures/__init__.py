"""What the state says: distributions, groups, kinds, and how they change over the run."""
