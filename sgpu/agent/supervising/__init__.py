"""The loop that keeps a run's workers alive, and what it acts with."""
