"""Batches on their way from a loader's worker processes."""
