"""What a step of an objective costs: forward, backward and the new state, beside its floor and two rivals."""
