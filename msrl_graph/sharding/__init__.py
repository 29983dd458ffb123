"""Sharding: which part of each tensor a rank holds, and moves between layouts."""
