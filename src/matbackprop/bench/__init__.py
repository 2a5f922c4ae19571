"""Benchmarks: suites that measure this package and what a user would pick instead, results, and their page."""

from matbackprop.bench.results import Results, load_results, save_results
from matbackprop.bench.run import run_suites
from matbackprop.bench.suites import SUITES

__all__ = ["SUITES", "Results", "load_results", "run_suites", "save_results"]
