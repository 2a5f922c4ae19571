"""Data sets, caches, checks and downloads. Import the modules by name; their optional dependencies differ."""
