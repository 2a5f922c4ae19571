"""Figures, tables and HTML reports of runs."""
