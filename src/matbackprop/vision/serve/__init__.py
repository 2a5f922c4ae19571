"""Local web page for segmentation."""
