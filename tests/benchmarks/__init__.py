"""Benchmarks: `python -m tests.benchmarks [--quick] [name ...]` prints a table each. Ratios hold within one run."""
