"""What parts of thermopile cost on this machine, each figure side by side with what a user would pick instead."""
