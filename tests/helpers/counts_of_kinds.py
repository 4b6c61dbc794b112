"""Counts of three kinds of rows, for benchmarks that ask how well latents tell them apart."""

import numpy as np


def counts_of_kinds(rate: float) -> tuple[np.ndarray, np.ndarray]:
    """Thirty rows of each kind, each larger by ``rate`` in two columns of its own, and what they are."""
    rng = np.random.default_rng(0)
    labels = np.repeat(np.arange(3), 30)
    rates = np.kron(np.eye(3), np.full((1, 2), rate)) + 1.0
    return rng.poisson(rates[labels]).astype(float), labels
