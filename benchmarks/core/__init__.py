"""What all benchmarks share: the table, scores, contestants, isolated fits, pictures."""
