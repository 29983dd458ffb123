"""A rank: one process on one device that generates, infers and updates."""
