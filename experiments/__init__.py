"""The paper's two tables and further experiments: ``python -m experiments NAME``.

``runs``            results.jsonl, provenance and hashes, and the options of all commands
``table1``          region classification on COCO
``backbones``       region classification by first and second order on five backbones
``exact_root``      second-order heads with an exact and with an iterated square root
``table2``          full-image segmentation on BSDS300
``baselines``       methods of table 2 without training
``refinement``      borders of a 12-megapixel photograph, enlarged and refined
``bsds500``         contours and regions by the protocol of BSDS500, compared with published methods
``cuts``            contour hierarchies with spectral distances, trained through the eigenvectors
``networks``        backbones that only the experiments use
"""
