"""Hugging Face Space that runs ``matbackprop serve``."""

from matbackprop.cli import main

main(["serve", "--host", "0.0.0.0", "--port", "7860"])
