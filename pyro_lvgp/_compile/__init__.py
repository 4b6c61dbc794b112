"""Recording of tensor operations as graphs, and compilation of the graphs."""
