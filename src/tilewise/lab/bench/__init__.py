"""Benchmarks: named suites, peers side by side, results as data."""
