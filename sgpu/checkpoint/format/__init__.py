"""What lies in a checkpoint's folder, as bytes and back."""
