"""The files that a user names, by paths or URLs: whether they are there, and what is in them."""
