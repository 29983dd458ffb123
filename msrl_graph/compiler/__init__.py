"""From text to plan: the list of passes that a compilation goes through."""
