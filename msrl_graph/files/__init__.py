"""The files that a user names: whether they are there, and what is in them."""
