"""Models: sizes, tensors by name and shape, and what a folder of Hugging Face says of them."""
