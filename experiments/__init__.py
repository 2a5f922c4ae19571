"""The paper's two tables, one of backbones and BSDS500's, each from one command that may be stopped and given again.

``table``           what all tables share: results that know what made them, runs, stages, timing, files
``table1``          region classification: its rows, and how one is trained, timed and summarised
``backbones``       region classification by first and second order on several backbones
``table2``          full-image segmentation, likewise
``bsds500``         the protocol of BSDS500, beside published methods
``baselines``       other ways to segment an image; ``multiscale_ncut`` is the longest of them
"""
