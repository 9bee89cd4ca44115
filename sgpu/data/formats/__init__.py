"""Data sets of what people load, each over a `VolumeDataset` and as exact: one file a kind."""
