"""Measurements that a user can repeat: what a link carries, next to what a plain socket carries."""
