"""The workers of one node."""
