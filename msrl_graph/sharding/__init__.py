"""Sharding: which part of which tensor a rank holds, and how it changes layouts."""
