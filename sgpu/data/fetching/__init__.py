"""Files come here before they are wanted."""
