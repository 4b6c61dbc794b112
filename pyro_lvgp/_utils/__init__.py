"""Validation, Cholesky factors, control flow, seeds, evaluation mode, interrupts and process groups."""
