"""Parts that all benchmarks share: result tables, scores, contestants, isolated fits, figures."""
