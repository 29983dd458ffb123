"""Function nodes and environments, which call the user's Python code on rows."""
