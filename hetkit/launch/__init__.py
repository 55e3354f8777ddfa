"""Processes and messages: the nursery, its workers, the channel and what travels on it."""
