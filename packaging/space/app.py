"""Hugging Face Space: the page of ``matbackprop serve`` on the Space's address."""

from matbackprop.cli import main

main(["serve", "--host", "0.0.0.0", "--port", "7860"])
