"""The benchmarks, one module each."""
