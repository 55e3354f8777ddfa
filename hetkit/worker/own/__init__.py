"""A training loop of the user's own, led by the same plans, grants and exchange as a task."""
