"""Where a cluster keeps what it exchanges: in host memory, or on the device of its parameters."""
