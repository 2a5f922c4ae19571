"""Benchmarks: suites that measure this package and what a user would pick instead, results, and their page."""

from matbackprop.bench.measure import Results, load_results, run_suites, save_results
from matbackprop.bench.suites import SUITES

__all__ = ["SUITES", "Results", "load_results", "run_suites", "save_results"]
