"""The checkpoint browser: what there is, what is in it, and what to do with it."""
