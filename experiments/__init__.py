"""The paper's two tables and three more: ``python -m experiments NAME``.

``runs``            results.jsonl, provenance and hashes, and the options that all commands share
``table1``          region classification on COCO
``backbones``       region classification by first and second order on five backbones
``exact_root``      second-order heads with an exact and with an iterated square root
``table2``          full-image segmentation on BSDS300
``baselines``       table 2's methods without training; ``multiscale_ncut`` is the longest of them
``refinement``      borders of a 12-megapixel photograph, enlarged and refined
``bsds500``         contours and regions by the protocol of BSDS500, next to published methods
"""
