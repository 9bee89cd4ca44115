"""The live objects: taken apart into tensors and plain values, and staged."""
