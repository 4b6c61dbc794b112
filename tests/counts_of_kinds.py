"""Counts of three kinds of rows, for benchmarks that ask how well latents tell them apart."""

from typing import Any

import numpy as np

from benchmarks.srflvm import Task


def counts_of_kinds(rate: float, **options: Any) -> Task:
    """Thirty rows of each kind, each larger by ``rate`` in two columns of its own, with what they are."""
    rng = np.random.default_rng(0)
    labels = np.repeat(np.arange(3), 30)
    rates = np.kron(np.eye(3), np.full((1, 2), rate)) + 1.0
    return Task(rng.poisson(rates[labels]).astype(float), labels, counts=True, **options)
