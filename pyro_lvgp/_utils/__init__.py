"""Validation, seeds, evaluation mode, interrupts and process groups."""
