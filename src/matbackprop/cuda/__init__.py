"""The CUDA room: kernels, when they may be used, and how they are paired with the general code that does the same."""
