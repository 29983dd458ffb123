"""Function nodes and environments: user Python code, called on rows of the dock."""
