"""Files that a user names by path or URL: their existence and their content."""
