"""Several nodes, one controller."""
