"""Models: their sizes, their tensors by name and shape, and Hugging Face folders."""
