"""What joins the leaders: frames, the door, membership, the handshake and deadlines."""
