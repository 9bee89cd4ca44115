"""Where files come from: folders and mounts (folder.py), and what is behind a URL (url.py); opening.py chooses."""
