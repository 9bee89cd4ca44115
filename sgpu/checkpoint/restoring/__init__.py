"""From a checkpoint, on a volume or in memory, back into the live objects."""
