"""Gradient codecs: how a bucket travels."""
