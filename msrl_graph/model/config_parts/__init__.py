"""Parts of a config.json that several families state."""
