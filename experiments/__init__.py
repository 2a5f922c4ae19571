"""The paper's two tables and further experiments: ``python -m experiments NAME``."""
