"""Looking at checkpoints without a training: what is there, whether it is whole, and copies for other tools."""
