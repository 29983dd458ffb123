"""Sharding: which part of which tensor a rank holds, and how layouts change."""
