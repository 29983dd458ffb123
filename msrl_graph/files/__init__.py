"""Files that a user names by path or URL: whether they exist, and their content."""
