"""Where a loader is in its data, whatever kind of data that is."""
