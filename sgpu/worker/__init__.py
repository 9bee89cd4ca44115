"""One process a GPU: set up, call the user's function, write its outcome. Started by command, never imported."""
