"""Benchmarks: suites that measure this package and its alternatives, results, and their page."""

from benchmarks.speed.measure import Results, load_results, run_suites, save_results
from benchmarks.speed.suites import SUITES

__all__ = ["SUITES", "Results", "load_results", "run_suites", "save_results"]
