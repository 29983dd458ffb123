"""The memory that engines of transformers' models need."""
