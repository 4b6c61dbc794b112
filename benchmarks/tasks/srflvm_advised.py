"""Advised RFLVM beside t-SNE: nearest neighbours in two dimensions, on the rows and splits of ``srflvm_layout``."""

from collections.abc import Iterator

import torch

from benchmarks.core.report import Measurement, Row
from benchmarks.peers.advised_rflvm import AdvisedRFLVM
from benchmarks.tasks import srflvm_layout
from benchmarks.tasks.srflvm_layout import BOUND, METHODS, TSNE, Map, Methods, Split, standardised

NUM_THREADS = srflvm_layout.NUM_THREADS
TASKS = srflvm_layout.TASKS
NUM_STEPS = 10_000
PUBLISHED: list[Row] = []
NOTES = """\
Rows, splits, folds and scores are those of `srflvm_layout`, whose t-SNE is the first row. Advised RFLVM is that of Li, Lin,
Yin and Zhang (2024) in our own implementation, `benchmarks/peers/advised_rflvm.py`, with the settings of the demonstration in
github.com/zhidilin/advisedGPLVM: two components of 25 frequencies each, drawn anew at every step, initial standard deviations
of frequencies of softplus(1) and noise variance of softplus(0), random initial weights and standard deviations of latents, and
10000 steps of Adam with a rate of 0.01. Three things differ. The objective is the bound of the model; the code divides the
divergence of the latents by 50 N^2 Q, and with more rows than features does not multiply the log determinant by the number of
columns and has sigma in place of log sigma. The data have standardised columns, images one unit, as those of the other
methods; in the code they are divided by their Frobenius norm, so that their variance, 1 / (N D), is near the lower limit of
the noise, 0.0001. Principal components are scaled to unit variance. Sets of more than 100 columns are fitted in float32. The
authors infer no latents of new rows."""


def advised(given: Split, num_steps: int) -> Map:
    """Fit advised RFLVM."""
    model = AdvisedRFLVM(torch.as_tensor(standardised(given)[0], dtype=given.train.peer_dtype)).fit(num_steps)
    return Map(model.latents().numpy(), others={BOUND: model.negative_bound()})


ADVISED: Methods = {
    TSNE: METHODS[TSNE],
    "advised RFLVM": (advised, {"components": 2, "frequencies of each": 25, "rate of Adam": 0.01, "steps": NUM_STEPS}),
}


def run(*, quick: bool, seeds: int, only: str | None = None) -> Iterator[Measurement]:
    """Measure both methods on all sets, or on one, for each seed; if quick, with few steps on some of the rows of one."""
    yield from srflvm_layout.measured(ADVISED, quick=quick, seeds=seeds, only=only, num_steps=NUM_STEPS)
