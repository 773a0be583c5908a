"""What a teacher tells, and how it travels."""
