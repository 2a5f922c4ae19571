"""Data: BSDS and COCO regions, shapes made on the fly, caches, checks and downloads.

Each module stands alone and is imported by its own name, so that using one needs the extras of that one only.
"""
