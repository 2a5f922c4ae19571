"""Benchmarks: suites that measure this package and its alternatives, results, and their page."""
