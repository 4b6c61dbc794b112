"""Benchmarks against peers on the same data and against published figures: ``python -m benchmarks --list``."""
