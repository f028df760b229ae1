"""The served page: an index of a run's samples, the questions put to it, and the server on this machine alone."""
