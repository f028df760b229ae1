"""What the run's encoders say: features of samples, their neighbours, a map, kinds confirmed."""
