"""Coverage of predictive intervals of entries that are hidden."""

from collections.abc import Sequence
from typing import Any

import pyro
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from pyro_lvgp.diagnostics._fixed_model import MakeGuide, fit_guide, fixed_copy
from pyro_lvgp.diagnostics.checks import CoverageCheck, IntervalCoverage
from pyro_lvgp.diagnostics.findings import NotApplicable
from pyro_lvgp.infer.protocols import HasEncoders
from pyro_lvgp.models import LatentVariableModel, Prediction
from pyro_lvgp.models.latent_process_model import LatentProcessModel

LEVELS = (0.5, 0.9)


def check_coverage(
    model: Any, guide: Any, args: tuple, *, share: float, make_guide: MakeGuide | None, seed: int
) -> CoverageCheck | NotApplicable:
    """Hide entries, predict them, and compare the coverage of intervals with that of simulations from the prediction.

    :param model: a model.
    :param guide: its guide.
    :param args: arguments of both.
    :param share: share of the observed entries to hide.
    :param make_guide: function that fits a new guide.
    :param seed: seed of the hidden entries and of the prediction.
    """
    if not isinstance(model, LatentVariableModel | LatentProcessModel):
        return NotApplicable(f"a {type(model).__name__} has no method impute, which predicts hidden entries")
    position = int(isinstance(model, LatentProcessModel))
    if make_guide is None and position and not (isinstance(guide, HasEncoders) and guide.encoder_of(model.gp_site)):
        return NotApplicable("the guide has parameters for each datum; pass make_guide to fit one without the hidden entries")
    y = args[position]
    hidden = entries_to_hide(y, share, seed)
    if not hidden.any():
        return NotApplicable("no row has two observed entries, of which one could be hidden")
    visible = (*args[:position], y.masked_fill(hidden, torch.nan), *args[position + 1 :])
    prediction = _predict(model, guide, visible, make_guide, seed)
    return _coverage(prediction, y, hidden, fitted_anew=make_guide is not None)


def entries_to_hide(y: Float[Tensor, "*batch D"], share: float, seed: int) -> Bool[Tensor, "*batch D"]:
    """Choose entries to hide at random; each row and each column keep an observed entry.

    :param y: data, NaN where missing.
    :param share: share of the observed entries.
    :param seed: seed of the choice.
    """
    order = torch.rand(y.shape, generator=torch.Generator().manual_seed(seed)).to(y.device)
    order = order.masked_fill(y.isnan(), torch.inf)
    hidden = (order < share) & ~y.isnan()
    columns = order.reshape(-1, y.shape[-1])
    last = (columns == columns.masked_fill(columns.isinf(), -1.0).amax(0)).reshape(y.shape)
    last |= order == order.masked_fill(order.isinf(), -1.0).amax(-1, keepdim=True)
    return hidden & ~last


def _predict(model: Any, guide: Any, visible: tuple, make_guide: MakeGuide | None, seed: int) -> Prediction:
    """Predict the missing entries of data, by a new guide or else by the latents of the rows under the given one."""
    if make_guide is not None:
        fixed = fixed_copy(model)
        with pyro.get_param_store().scope():
            return fixed.impute(fit_guide(make_guide, fixed, visible), *visible)
    if isinstance(model, LatentProcessModel):
        return model.impute(guide, *visible)
    y = visible[0]
    return model.impute(guide, y, latents=model.infer_latents(guide, y, seed=seed))


def _coverage(prediction: Prediction, y: Tensor, hidden: Bool[Tensor, "..."], *, fitted_anew: bool) -> CoverageCheck:
    ends = [(1.0 - level) / 2.0 for level in LEVELS] + [(1.0 + level) / 2.0 for level in LEVELS]
    lower, upper = prediction.quantile(ends).split(len(LEVELS))
    simulated = prediction.sample()
    intervals = []
    for level, low, high in zip(LEVELS, lower, upper, strict=True):
        covered = (low <= y) & (y <= high) & hidden
        expected = ((low <= simulated) & (simulated <= high))[:, hidden].double().mean().item()
        intervals.append(_interval(level, covered, hidden, expected))
    missed = ((y < lower[-1]) | (y > upper[-1])) & hidden
    rows = _rows_outside(missed, hidden, 1.0 - intervals[-1].expected) if y.dim() == 2 else ()
    return CoverageCheck(tuple(intervals), int(hidden.sum()), rows, fitted_anew)


def _interval(level: float, covered: Tensor, hidden: Tensor, expected: float) -> IntervalCoverage:
    r"""Coverage :math:`\hat p = \sum_n c_n / \sum_n m_n`, with the standard error of a ratio of sums over rows.

    It is at least that of independent entries of the expected coverage, because few rows may by chance all be covered.
    """
    rows = (-1, hidden.shape[-1])
    counts, numbers = (mask.reshape(rows).sum(1).double() for mask in (covered, hidden))
    total, num_rows = numbers.sum(), int((numbers > 0.0).sum())
    coverage = counts.sum() / total
    between = (counts - coverage * numbers).square().sum() * num_rows / max(num_rows - 1, 1)
    independent = max(expected * (1.0 - expected), 0.25 / float(total)) * total
    error = torch.maximum(between, independent).sqrt() / total
    return IntervalCoverage(level, coverage.item(), error.item(), expected)


def _rows_outside(missed: Bool[Tensor, "N D"], hidden: Bool[Tensor, "N D"], expected: float) -> tuple[int, ...]:
    """Rows with more than twice the expected number of entries outside their intervals, and more than one, worst first."""
    counts = missed.sum(1)
    excess = counts - 2.0 * expected * hidden.sum(1)
    rows: Sequence[int] = ((excess > 0.0) & (counts > 1)).nonzero()[:, 0].tolist()
    return tuple(sorted(rows, key=lambda row: -float(excess[row])))
