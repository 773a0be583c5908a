"""The codecs on Paddle's devices: tensors stay where they are, only payloads are copied to the host."""
