"""From staged memory to a committed checkpoint. Without torch."""
