"""Recording of tensor operations as graphs, and their compilation."""
