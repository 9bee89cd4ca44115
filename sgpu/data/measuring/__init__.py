"""What a loader counts, and where its time goes."""
