"""Volumes that are repositories on Hugging Face's hub."""
