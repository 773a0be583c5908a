"""Who is at the other end: keys, certificates and TLS 1.3 sessions, for the door and for the transports alike."""
