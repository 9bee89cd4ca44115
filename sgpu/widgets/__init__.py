"""Where a run is shown: feed (run folder to plain Snapshot), text, widget."""
