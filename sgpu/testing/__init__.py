"""Public helpers for tests: fakes behind the product's own protocols, fault plans, and the laws."""
