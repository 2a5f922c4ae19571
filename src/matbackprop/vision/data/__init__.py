"""Data sets, caches, checks and downloads. Import the modules by name; each has separate optional dependencies."""
