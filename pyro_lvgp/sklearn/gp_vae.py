"""GP-VAE of series with missing entries as an estimator that selects its own latents."""

import math
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from sklearn.base import BaseEstimator
from sklearn.utils.parallel import Parallel, delayed
from sklearn.utils.validation import check_is_fitted
from torch import Tensor
from tqdm import tqdm

from pyro_lvgp._utils.tables import Labels, as_double_tensor, check_columns, labels_of
from pyro_lvgp._utils.validation import check_new_inputs, check_series, check_sizes
from pyro_lvgp.diagnostics.model_selection import shifted_folds
from pyro_lvgp.kernels import Cosine, Kernel, Matern, Stack
from pyro_lvgp.models import LinearGPVAE, Prediction
from pyro_lvgp.models._row_regression import RowRegression, patterns
from pyro_lvgp.models._separate_processes import SeparateProcesses
from pyro_lvgp.sklearn._series import TimeAxis, as_dates
from pyro_lvgp.sklearn._stacked_series import hidden_log_prob, mix, stack

__all__ = ["GPVAERegressor"]

_MAX_DIM = 8  # latents of each kind
_NUM_HARMONICS = 3
_ENTRIES_OF_FIT = 2000  # of separate processes
_MAX_ROWS, _MAX_PATTERNS = 1000, 5  # of regressions, whose cost is cubic in the rows for each pattern

Candidate = LinearGPVAE | SeparateProcesses | RowRegression


class GPVAERegressor(BaseEstimator):
    r"""GP-VAE with a linear decoder that chooses its latents by predictions of hidden entries.

    Candidates are separate processes, regressions, and :class:`~pyro_lvgp.models.LinearGPVAE` models of Gaussian noise:

    - ``"separate"``: for each output a Matérn-½ or a Matérn-3⁄2 process, whichever has the larger evidence, or a Matérn-½ and
      a quasi-periodic process if a ``period`` is given;
    - ``"white"``: white latents alone, as in factor analysis;
    - ``"rough"``: Matérn-½ processes and white latents;
    - ``"smooth"``: Matérn-3⁄2 processes and white latents;
    - ``"periodic"``: Matérn-½ processes, quasi-periodic processes and white latents, if a ``period`` is given;
    - ``"regression"``: for each pattern of missing outputs, Gaussian-process regressions on the observed outputs of a row,
      whatever its input; if the data have at most 1000 rows, and one to five patterns of rows with observed and with missing
      entries.

    The numbers of latents are upper limits: relevances shrink the weights of those that the data do not need.  Each candidate
    is fitted to data with additional gaps (:func:`~pyro_lvgp.diagnostics.shifted_folds`).  The prediction is the mixture

    .. math:: \sum_{c j} w_c\, v_{cj}\, p_c\big(m_c + (y - m_c) / \phi_j\big) / \phi_j

    of the predictions :math:`p_c`, with means :math:`m_c`, of the candidates, with factors :math:`\phi_j` = 1, 1.4, 2 and 3 on
    their standard deviations.  The weights v of the factors, and then w of the candidates, are those under which the hidden
    entries have the highest density (:func:`~pyro_lvgp.diagnostics.stacking_weights`): the gaps tell how far the models are
    from the truth, which noise and posterior of a model do not.  Entries of one gap depend on each other.  So the evidence on
    factors is that of as many observations as there are gaps, and that on candidates of as many as there are gaps in all
    outputs: few gaps exclude nothing.

    Weights are chosen twice: at inputs at which some outputs are observed, from which the others may be predicted, and at
    inputs without data, new ones among them, where time alone tells about the outputs.

    :param period: length of a cycle in units of the inputs, such as 24.0 for hourly data with a daily cycle; for dates a
        duration, such as ``pandas.Timedelta(days=1)``.
    :param n_folds: number of folds.
    :param max_iter: maximum number of sweeps, or of steps of L-BFGS for ``"separate"`` and ``"regression"``, of a fit.
    :param n_jobs: number of processes for the fits, which are independent; by default one, -1 for all processors.
    :param verbose: whether to show a progress bar.

    A fitted estimator has the attributes

    - ``models_``: fitted models by the name of the candidate;
    - ``weights_`` and ``gap_weights_``: their weights in the mixture, at inputs with and without data;
    - ``factor_weights_`` and ``gap_factor_weights_``: shares of the factors on the standard deviations of each;
    - ``time_unit_``: unit of the inputs if they are dates, from ``"days"`` to ``"seconds"``; None for numbers;
    - ``held_out_nll_``: mean negative log densities of hidden entries, in nats.

    Source: Ashman (2020) for the model; Yao, Vehtari, Simpson and Gelman (2018) for stacking; Yao, Pirš, Vehtari and Gelman
    (2022), "Bayesian hierarchical stacking", for weights that depend on the input.

    >>> t = torch.linspace(0.0, 1.0, 40, dtype=torch.float64)
    >>> Y = torch.sin(9.0 * t[:, None] + torch.arange(3)) + 0.1 * torch.randn(40, 3, dtype=torch.float64)
    >>> Y[25:35, 0] = torch.nan
    >>> gpvae = GPVAERegressor(n_folds=2, max_iter=5).fit(t, Y)
    >>> gpvae.predict().mean.shape, gpvae.predict(torch.tensor([1.1], dtype=torch.float64)).stddev.shape
    (torch.Size([40, 3]), torch.Size([1, 3]))
    """

    models_: dict[str, Candidate]
    weights_: dict[str, float]
    gap_weights_: dict[str, float]
    factor_weights_: dict[str, dict[float, float]]
    gap_factor_weights_: dict[str, dict[float, float]]
    held_out_nll_: dict[str, float]
    time_unit_: str | None

    def __init__(
        self,
        *,
        period: float | timedelta | np.timedelta64 | None = None,
        n_folds: int = 3,
        max_iter: int = 100,
        n_jobs: int | None = None,
        verbose: bool = False,
    ):
        self.period = period
        self.n_folds = n_folds
        self.max_iter = max_iter
        self.n_jobs = n_jobs
        self.verbose = verbose

    @torch.inference_mode(False)  # parameters of kernels are learned wherever the method is called
    def fit(self, X: Any, y: Any) -> "GPVAERegressor":
        """Compare the candidates on hidden entries, and fit them to all data.

        :param X: inputs [N] or [N, P]: tensor, array, series or data frame; or dates.
        :param y: data [N, D], or [N] of one output, NaN where missing: tensor, array, series or data frame, whose labels the
            predictions keep.
        :raises ValueError: for data of another shape, inputs that are not finite, outputs without an observation, columns that
            are not numbers, or a period that is not positive, no duration for dates, or comes with several input columns.
        """
        check_sizes(n_folds=self.n_folds, max_iter=self.max_iter)
        dates = as_dates(X)
        self._axis = None if dates is None else TimeAxis.of(dates)
        self.time_unit_ = None if self._axis is None else self._axis.unit
        x, data = self._as_inputs(X), as_double_tensor(y, name="y")
        data = data[:, None] if data.dim() == 1 else data
        check_series(x, data)
        _, rows, self._columns = labels_of(y)
        self._rows = X if rows is None and dates is not None else rows
        self._inputs, self._input_columns = x, labels_of(X).columns
        folds = list(shifted_folds(data, self.n_folds))
        self._spread, self._cycle = _spread(x), self._period(x)
        x = x / self._spread
        candidates = self._candidates(x, data.shape[1])
        if len(data) <= _MAX_ROWS and 1 <= len(patterns(data)) <= _MAX_PATTERNS:
            candidates["regression"] = RowRegression

        tasks = [(name, data.masked_fill(fold, torch.nan)) for name in candidates for fold in folds]
        results = self._run(_predicted, [(candidates[name], x, part, self.max_iter) for name, part in tasks])
        predicted: dict[str, list[Prediction]] = {name: [] for name in candidates}
        for (name, _), prediction in zip(tasks, results, strict=True):
            predicted[name].append(prediction)
        log_prob = hidden_log_prob(predicted, data, folds)
        self.held_out_nll_ = {name: -by_factor[1.0].mean().item() for name, by_factor in log_prob.items()}
        self._shares = stack(log_prob, data, folds)
        self.weights_, self.gap_weights_ = (shares.weights for shares in self._shares)
        self.factor_weights_, self.gap_factor_weights_ = (shares.factors for shares in self._shares)
        self._is_empty = data.isnan().all(1)
        used = [name for name in candidates if name in self.weights_ or name in self.gap_weights_]
        models = self._run(_fitted, [(candidates[name], x, data, self.max_iter) for name in used])
        self.models_ = dict(zip(used, models, strict=True))
        return self

    def _run(self, function: Callable[..., Any], arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Call a function with each of several arguments, in ``n_jobs`` processes."""
        results = Parallel(n_jobs=self.n_jobs, return_as="generator")(delayed(function)(*each) for each in arguments)
        return list(tqdm(results, total=len(arguments), unit="fit", disable=not self.verbose))

    def predict(self, X: Any = None, *, num_samples: int = 100) -> Prediction:
        """Predict y in the units of the data, as a :class:`~pyro_lvgp.models.Prediction`.

        :param X: inputs; those of the data by default.
        :param num_samples: number of draws of the decoder of each ``LinearGPVAE``.
        :raises ValueError: for numbers after a fit to dates, dates after a fit to numbers, or dates with a time zone after a
            fit to dates without, or the reverse; for other columns than those of the fit, or inputs that are not finite.
        """
        check_is_fitted(self)
        inputs = self._inputs if X is None else self._as_inputs(X)
        if X is not None:
            check_columns(labels_of(X).columns, self._input_columns, "X")
            check_new_inputs(inputs, self._inputs, self._inputs)
        x_new = None if X is None else inputs / self._spread
        predictions = {name: model.predict(x_new, num_samples=num_samples) for name, model in self.models_.items()}
        is_empty = self._is_empty if X is None else torch.ones(len(inputs), dtype=torch.bool)
        pooled = mix(predictions, *self._shares, is_empty)
        pooled.coords["x"] = (("points", "input"), inputs)
        own_rows = None if self._axis is None else X
        pooled.coords |= Labels(None, self._rows if X is None else own_rows, self._columns).coords(pooled.dims)
        return pooled

    def _as_inputs(self, X: Any) -> Float[Tensor, "N P"]:
        """Inputs as numbers, on the time axis of the fit if they are dates."""
        dates = as_dates(X)
        if (dates is None) != (self._axis is None):
            expected, got = ("numbers", "dates") if self._axis is None else ("dates", "numbers")
            raise ValueError(f"expected {expected} as inputs, as in fit, got {got}; pass a list or an index of {expected}")
        if self._axis is not None:
            return self._axis.numbers(dates)
        try:
            x = as_double_tensor(X, name="X")
        except ValueError as error:
            raise ValueError(
                f"{error}; pass dates as one index or series of pandas.to_datetime(...), of several time zones with utc=True"
            ) from error
        return x[:, None] if x.dim() == 1 else x

    def _period(self, x: Float[Tensor, "N P"]) -> float | None:
        """Length of a cycle in units of the inputs."""
        if self.period is None:
            return None
        period: Any = self.period
        if isinstance(period, timedelta | np.timedelta64) != (self._axis is not None):
            raise ValueError(
                f"expected a number as the period of numbers, and a duration such as pandas.Timedelta(hours=24) as that of "
                f"dates, got {self.period!r}"
            )
        period = period if self._axis is None else self._axis.length(period)
        if not (period > 0.0 and x.shape[1] == 1):
            raise ValueError(
                f"expected a positive period for one column of inputs, got {self.period} for {x.shape[1]} columns"
            )
        return float(period)

    def _candidates(self, x: Float[Tensor, "N P"], data_dim: int) -> dict[str, Callable[[], Candidate]]:
        """Functions that make a new model of each candidate, which other processes can import."""
        num_processes, num_white = min(data_dim, _MAX_DIM), min((data_dim + 1) // 2, _MAX_DIM)
        num_smooth = min(max(data_dim // 4, 2), (num_processes + 1) // 2)  # more follow what the outputs do not share
        kernels: dict[str, Callable[[], Kernel] | None] = {
            "white": None,
            "rough": partial(_processes, x, num_processes, 0.5),
            "smooth": partial(_processes, x, num_smooth, 1.5),
        }
        period = None if self._cycle is None else self._cycle / self._spread.item()
        if period is not None:
            kernels["periodic"] = partial(_processes_and_cycles, x, (num_processes + 1) // 2, period)
        return {"separate": partial(_separate, x, data_dim, period)} | {
            name: partial(_linear, kernel, num_white) for name, kernel in kernels.items()
        }


def _linear(kernel: Callable[[], Kernel] | None, num_white: int) -> LinearGPVAE:
    return LinearGPVAE(kernel and kernel(), independent_dim=num_white)


def _separate(x: Float[Tensor, "N P"], data_dim: int, period: float | None) -> SeparateProcesses:
    """Make processes whose parameters are learned in groups of outputs with some thousand entries.

    Evidence is that of short steps of time.  Smooth processes without a cycle may have the largest, and be worst in long gaps.
    """
    sizes = [len(part) for part in torch.arange(data_dim).split(max(_ENTRIES_OF_FIT // len(x), 1))]
    if period is not None:
        return SeparateProcesses([[_kernel_with_cycle(x, size, period)] for size in sizes])
    return SeparateProcesses([[_kernel_of_outputs(x, size, nu) for nu in (0.5, 1.5)] for size in sizes])


def _fitted(make: Callable[[], Candidate], x: Tensor, data: Tensor, max_iter: int) -> Candidate:
    """Make a candidate and fit it to data."""
    model = make()
    if isinstance(model, LinearGPVAE):
        model.fit(x, data, num_sweeps=max_iter)
    else:
        model.fit(x, data, num_steps=max_iter)
    return model


def _predicted(make: Callable[[], Candidate], x: Tensor, data: Tensor, max_iter: int) -> Prediction:
    """Predict the missing entries of data from the others."""
    return _fitted(make, x, data, max_iter).predict()


def _spread(x: Float[Tensor, "N P"]) -> Float[Tensor, " P"]:
    """Range of each input without wide gaps, which is the unit of lengthscales: N times the median step of times."""
    spread = len(x) * x.sort(0).values.diff(dim=0).median(0).values if x.shape[1] == 1 else x.amax(0) - x.amin(0)
    return torch.where(spread > 0.0, spread, 1.0)


def _processes(x: Float[Tensor, "N P"], num: int, nu: float) -> Matern:
    """Matérn kernels with lengthscales from four steps to a tenth of the spread of the inputs, which is 1."""
    shares = torch.logspace(math.log10(min(4.0 / len(x), 0.1)), -1.0, num, dtype=x.dtype)
    return _with_unit_variance(Matern(x.shape[1], nu, lengthscale=shares[:, None], ard=False, batch_shape=(num,)))


def _processes_and_cycles(x: Float[Tensor, "N P"], num: int, period: float) -> Stack:
    return Stack(_processes(x, num, 0.5), *_cycles(period))


def _kernel_of_outputs(x: Float[Tensor, "N P"], num: int, nu: float) -> Matern:
    """Kernel of a process for each output, with a lengthscale of a third of the spread of the inputs, which is learned."""
    return Matern(x.shape[1], nu, lengthscale=0.3, ard=False, batch_shape=(num,))


def _kernel_with_cycle(x: Float[Tensor, "N P"], num: int, period: float) -> Kernel:
    """Kernel of a rough process for each output and of its cycle."""
    batch = (num,)
    cycles = (
        Matern(1, 0.5, lengthscale=10.0 * period, variance=0.3 / order**2, batch_shape=batch)
        * Cosine(1, period=period / order, batch_shape=batch).requires_grad_(False)
        for order in range(1, _NUM_HARMONICS + 1)
    )
    return sum(cycles, _kernel_of_outputs(x, num, 0.5))


def _cycles(period: float) -> list[Kernel]:
    """Quasi-periodic kernels: two processes for each harmonic, so that each output can have a cycle of its own shape."""
    lengthscale = period * torch.tensor([[10.0], [30.0]], dtype=torch.float64)
    return [
        _with_unit_variance(Matern(1, 0.5, lengthscale=lengthscale, batch_shape=(2,)))
        * _with_unit_variance(Cosine(1, period=period / order, batch_shape=(2,)))
        for order in range(1, _NUM_HARMONICS + 1)
    ]


def _with_unit_variance(kernel: Any) -> Any:
    """Freeze the variance of a kernel, since the weights have the scale of a process; also the period of a cycle."""
    for name, parameter in kernel.named_parameters():
        if not name.startswith("lengthscale"):
            parameter.requires_grad_(False)
    return kernel
