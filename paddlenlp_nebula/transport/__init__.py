"""How bytes get from one leader to another: courier (default), world, loopback."""
