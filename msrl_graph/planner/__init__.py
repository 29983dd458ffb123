"""Choices that the file leaves open: pools, layouts, engines, and offloading."""
