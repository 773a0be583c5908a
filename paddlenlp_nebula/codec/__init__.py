"""Tensor <-> bytes: what a bucket looks like on the wire."""
