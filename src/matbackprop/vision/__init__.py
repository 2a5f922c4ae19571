"""Image segmentation and region classification built on the operators."""
