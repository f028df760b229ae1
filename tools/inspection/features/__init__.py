"""Features from the run's encoders: of samples, their neighbours, a map, kinds confirmed."""
