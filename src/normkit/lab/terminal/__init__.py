"""What `normkit lab` prints: tables, progress, the commands themselves."""
