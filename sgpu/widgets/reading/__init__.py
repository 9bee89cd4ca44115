"""From a run folder to Snapshots."""
