"""The paper's two tables and BSDS500's, from one command each that may be stopped at any time and given again.

``store``     results that know what made them
``jobs``      runs, several at a time, within a time limit
``table``     what both tables share: stages, timing, the files of a table
``table1``    region classification: its rows, and how one is trained, timed and summarised
``table2``    full-image segmentation, likewise
``bsds500``   the protocol of BSDS500, beside published methods
``baselines`` other ways to segment an image
"""
