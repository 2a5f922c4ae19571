"""Data sets, caches, checks and downloads. Import the modules by name; each needs only its own extras."""
