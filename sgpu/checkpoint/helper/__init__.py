"""The process that finishes a node's checkpoints, and what a trainer says to it. Without torch."""
