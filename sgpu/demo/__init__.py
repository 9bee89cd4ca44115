"""`sgpu demo`: the whole path on this machine, with a worker killed in the middle, and proof of what came of it."""
