"""Recurrent layers in a transformers model: rows, and tensor parallelism."""
