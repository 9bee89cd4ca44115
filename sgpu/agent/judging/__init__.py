"""What went wrong, and who is to blame: from what was seen."""
