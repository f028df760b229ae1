"""What a user asks of a machine: what can it feed, and what does a training step cost here."""
