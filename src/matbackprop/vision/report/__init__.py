"""Reports: figures (matplotlib), tables (console, Markdown, HTML) and one self-contained page for each run.

The modules are independent of training: they read plain arrays, dictionaries and the files of a run folder.
"""
