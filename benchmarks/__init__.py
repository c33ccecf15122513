"""Benchmarks and experiments; run from the repository root, not installed."""
