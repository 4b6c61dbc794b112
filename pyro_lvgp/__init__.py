"""Latent-variable Gaussian processes in Pyro."""

__version__ = "0.1.0"
