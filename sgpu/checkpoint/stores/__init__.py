"""Places for files: a folder, or anything that fsspec reaches. Without torch."""
