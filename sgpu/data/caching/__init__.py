"""The node's copies of a volume's files: brought once, checked, and gone when room is wanted."""
