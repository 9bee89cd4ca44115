"""What processes of a node share, copy and outlive."""
