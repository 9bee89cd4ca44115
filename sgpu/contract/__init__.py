"""What both sides of a process boundary agree on: the run folder, its records, the payload, the errors."""
