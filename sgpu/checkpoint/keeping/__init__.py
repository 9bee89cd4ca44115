"""Which checkpoints of a root count, which stay, and which go. Without torch."""
