"""The paper's two tables, one of backbones and BSDS500's, each from one command that may be stopped and given again.

``store``           results that know what made them
``table``           what all tables share: runs, stages, timing, the files of a table
``table1``          region classification: its rows, and how one is trained, timed and summarised
``backbones``       region classification by first and second order on several backbones
``table2``          full-image segmentation, likewise
``bsds500``         the protocol of BSDS500, beside published methods
``baselines``       other ways to segment an image; ``multiscale_ncut`` is the longest of them
"""
