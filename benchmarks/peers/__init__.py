"""Models of other libraries and reference methods, started from the initial values of our models."""
