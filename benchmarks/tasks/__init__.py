"""Benchmarks, one module each, and scripts that draw their figures."""
