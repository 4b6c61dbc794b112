"""Benchmarks beside other libraries on the same data and beside published figures: ``python -m benchmarks --list``."""
