"""What a student minimises: how far its answers are from a teacher's, and from the truth.

Losses are for each row (a position that counts, see `places`), float32, shape (rows,), and computed in float32
whatever the dtype of what they get; `mean` makes one number of them.
"""
