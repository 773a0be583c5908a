"""What a run did: counted per round, written as JSON."""
