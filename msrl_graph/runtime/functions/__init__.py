"""Function nodes and environments: the user's Python, called on rows of the dock."""
