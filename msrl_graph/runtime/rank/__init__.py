"""A rank: what it generates, infers and updates."""
