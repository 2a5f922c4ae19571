"""Suites that measure this package and its alternatives, their results and their page."""
