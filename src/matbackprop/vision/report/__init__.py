"""Figures, tables and pages of runs, from plain arrays, dictionaries and the files of a run folder."""
