"""Structured matrix layers for PyTorch whose gradients are exact, finite and fast."""

__version__ = "0.1.0"
