"""When the clusters exchange, and what."""
