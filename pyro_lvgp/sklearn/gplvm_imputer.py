"""Predictions of missing entries of tables by Bayesian GPLVMs and mixtures of Gaussians without settings."""

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pyro
import torch
from jaxtyping import Bool, Float
from numpy.random import RandomState
from pyro.distributions import Normal
from sklearn.base import OneToOneFeatureMixin, TransformerMixin
from sklearn.utils import check_random_state
from sklearn.utils.parallel import Parallel, delayed
from sklearn.utils.validation import check_is_fitted
from torch import Tensor

from pyro_lvgp._utils.seeding import seeded
from pyro_lvgp._utils.tables import Labels, labels_of
from pyro_lvgp._utils.validation import check_sizes, check_values
from pyro_lvgp.conjugate.gaussian_mixture import GaussianMixture, gaussian_mixture
from pyro_lvgp.diagnostics import stacking_weights
from pyro_lvgp.distributions import WarpedNormal, YeoJohnsonTransform
from pyro_lvgp.guides import MeanFieldGuide
from pyro_lvgp.models import BayesianGPLVM, Prediction, RowArguments
from pyro_lvgp.sklearn._candidates import Candidate, Gaussians, candidates, most_rows
from pyro_lvgp.sklearn._known_table import KnownTable
from pyro_lvgp.sklearn._posterior_points import posterior_points, stratified
from pyro_lvgp.sklearn._pyro_state import own_parameters
from pyro_lvgp.sklearn._rows import RowsEstimator, fill_missing, fit_gplvm, scaled_rows

__all__ = ["GPLVMImputer"]

_FACTORS = (0.5, 0.7, 1.0, 1.4, 2.0, 3.0, 5.0)  # of predictive standard deviations
_NUM_HELD_OUT, _MAX_FOLDS = 100, 4
_ALL_FOLDS = 8  # of tables with fewer rows than are to be held out
_LEAST_WEIGHT = 0.01
_LEAST_ROWS = 4
_STACKING_TOLERANCE = 1e-3  # nats per entry: held-out entries are few, and further steps fit them
_NUM_POINTS = 32  # of the latents of a row, or of its Gaussians
_DIMS = ("data", "output")
_CHUNK_SIZE = 200  # rows, which bounds the memory


class _Fit(NamedTuple):
    """A fitted model, its guide, and the mixture that its training latents were fitted by."""

    model: BayesianGPLVM
    guide: MeanFieldGuide
    prior: Any


class GPLVMImputer(OneToOneFeatureMixin, TransformerMixin, RowsEstimator):
    r"""Predictions of missing entries of a table by Bayesian GPLVMs and mixtures of Gaussians, without settings.

    The fit has the floating-point precision of the data.  Each column is standardised and made more normal by a power
    transformation g_d.  Models of several sizes, all of the form

    .. math::

        g(y_n) = f(x_n) + W z_n + \epsilon_n, \qquad f_d \sim GP(c_d, k), \quad z_n \sim N(0, I_r), \quad
        \epsilon_n \sim N(0, \mathrm{diag}\, \psi)

    (:class:`~pyro_lvgp.models.BayesianGPLVM` with :class:`~pyro_lvgp.likelihoods.LowRankGaussian`), a Gaussian, and mixtures
    of 2 to 20 Gaussians, one for twelve rows, with and without the power transformation
    (:func:`~pyro_lvgp.conjugate.gaussian_mixture.gaussian_mixture`), are fitted to all rows but some that are held out.  Of
    the held-out rows, entries are hidden and predicted, as those of new rows.  The prediction of an entry is the mixture

    .. math::

        \sum_{c j} w_{cj}\, N\big(g_c(y);\; m_c,\; (\phi_j s_c)^2\big)\, g_c'(y)

    over the candidates c and the factors :math:`\phi_j` from 0.5 to 5 on the predictive standard deviations, whose weights w
    maximise the density of the hidden entries (stacking).  The weights thus choose between curves, linear relations, and
    groups with linear relations of their own, and correct the noise, which is too small if it is estimated from training rows
    alone, since their latents are fitted.

    A step of the fit of K Gaussians to rows with :math:`M_n` missing entries takes some
    :math:`K (D^3 + \sum_n (M_n^3 + D^2))` multiplications.  Above :math:`2 \cdot 10^8` Gaussians are fitted to fewer rows,
    drawn at random, and are no candidates if less than twelve rows for each remain.

    Latents of all rows, training rows included, are inferred by Laplace's approximation under a mixture of Gaussians as prior,
    which is fitted to the training latents.

    What is known of each row (:class:`~pyro_lvgp.models.RowArguments`) is an argument ``rows`` of all methods:

    - Candidates are the models alone, since Gaussians cannot use it; with priors of latents these have the dimensions of the
      priors.
    - With standard errors columns are standardised alone, since errors of a power are not Gaussian.  Errors are in the units
      of the columns.  Predictions of missing entries include theirs, which the factors do not multiply.
    - Rows of weight 0 are left out.  Other weights multiply the terms of a row in the bounds of the models, and the log
      densities of its hidden entries in the choice of the weights w.
    - Exposures are refused, since the noise is Gaussian.

    :param n_folds: number of sets of held-out rows, each with its own fits, which are averaged.  By default as many that 100
        rows are held out, 4 at most, or 8 for tables of fewer than 100 rows: fewer rows choose weights by chance.
    :param max_iter: number of steps of Adam of each fit.
    :param batch_size: number of rows in a mini-batch.
    :param learning_rate: initial learning rate, which falls to zero along a cosine.
    :param n_jobs: number of processes for the fits, which are independent; by default one, -1 for all processors.
    :param random_state: seed of held-out entries, initial values, mini-batches and draws.
    :param verbose: whether to show progress bars.

    A fitted estimator has the attributes

    - ``fits_``: for each candidate (its numbers of latent dimensions and of factors) and each fold the model, its guide and
      the prior of latents, or for ``Gaussians(number, power)`` the mixtures; candidates without weight are left out;
    - ``weights_``: weights of the candidates;
    - ``warp_``: the power transformation;
    - ``n_iter_``: number of steps of each fit;
    - ``n_features_in_``, and ``feature_names_in_`` if columns have names.

    Source: Titsias and Lawrence (2010), "Bayesian Gaussian process latent variable model"; Snelson, Ghahramani and Rasmussen
    (2004), "Warped Gaussian processes"; Yao, Vehtari, Simpson and Gelman (2018), "Using stacking to average Bayesian
    predictive distributions"; Ghahramani and Jordan (1994), "Supervised learning from incomplete data via an EM approach".

    >>> from sklearn.datasets import load_iris
    >>> X = load_iris().data
    >>> X[::3, 2] = np.nan
    >>> imputer = GPLVMImputer(max_iter=10, n_folds=1, random_state=0).fit(X)
    >>> bool(np.isnan(imputer.transform(X)).any())
    False
    >>> y = imputer.predictive(X[:2])  # mean, stddev, quantile, log_prob and sample, in the units of the data
    >>> y.mean.shape, y.quantile([0.05, 0.95]).shape
    (torch.Size([2, 4]), torch.Size([2, 2, 4]))
    """

    fits_: dict[Candidate, list[_Fit | GaussianMixture]]
    weights_: dict[Candidate, float]
    warp_: YeoJohnsonTransform

    def __init__(
        self,
        *,
        n_folds: int | None = None,
        max_iter: int = 300,
        batch_size: int = 128,
        learning_rate: float = 0.05,
        n_jobs: int | None = None,
        random_state: int | RandomState | None = None,
        verbose: bool = False,
    ):
        self.n_folds = n_folds
        self.max_iter = max_iter
        self.batch_size = batch_size
        self.learning_rate = learning_rate
        self.n_jobs = n_jobs
        self.random_state = random_state
        self.verbose = verbose

    def fit(self, X: Any, y: Any = None, rows: RowArguments | None = None) -> "GPLVMImputer":
        """Fit the candidates, and their weights by held-out rows.

        :param X: rows [N, D], NaN where missing.
        :param y: ignored.
        :param rows: known quantities of the rows, or one row of them for all; None for nothing.
        :raises ValueError: for columns without observed entries, fewer than four rows with observed entries, infinite entries,
            sizes that are not positive, or known quantities of other rows or columns.
        :raises TypeError: for ``rows`` that are no ``RowArguments``, or that have exposures.
        """
        check_sizes(max_iter=self.max_iter, batch_size=self.batch_size)
        if self.n_folds is not None:
            check_sizes(n_folds=self.n_folds)
        X = self._validated(X, ensure_min_samples=_LEAST_ROWS)
        Y, known = _used_rows(X, rows)
        self._local = pyro.settings.get("module_local_params")
        self._seed = int(check_random_state(self.random_state).randint(np.iinfo(np.int32).max))
        self._row_parts = frozenset() if known is None else frozenset(known.parts())
        self.warp_ = _warp(Y.double(), is_linear="standard_error" in self._row_parts)
        table = KnownTable(Y.double(), known)
        sizes = candidates(table)
        fits: dict[Candidate, list[_Fit | GaussianMixture]] = {size: [] for size in sizes}
        log_prob: dict[Candidate, list[Tensor]] = {size: [] for size in sizes}
        folds = list(enumerate(self._held_out(table.values)))
        tasks = [(size, fold, held_out) for fold, held_out in folds for size in sizes]
        results = Parallel(n_jobs=self.n_jobs)(delayed(self._fit_and_score)(table, Y.dtype, *task) for task in tasks)
        for (size, *_), (fitted, values) in zip(tasks, results, strict=True):
            fits[size].append(fitted)
            log_prob[size].append(values)
        joined = {
            (size, factor): values
            for size, parts in log_prob.items()
            for factor, values in zip(_FACTORS, torch.cat(parts, 1), strict=True)
        }
        weights = _weights(joined, self._weights_of_hidden(table, folds))
        self.weights_ = {size: sum(weights[size, factor] for factor in _FACTORS) for size in sizes}
        self.weights_ = {size: weight for size, weight in self.weights_.items() if weight > _LEAST_WEIGHT}
        self._factors = {size: torch.tensor([weights[size, factor] for factor in _FACTORS]).double() for size in self.weights_}
        self.fits_ = {size: fits[size] for size in self.weights_}
        self.n_iter_ = self.max_iter
        return self

    def _held_out(self, T: Tensor) -> Iterator[Bool[Tensor, " N"]]:
        """Rows of each fold that are held out, an eighth of all."""
        number = max(len(T) // 8, 1)
        order = torch.randperm(len(T), generator=torch.Generator().manual_seed(self._seed))
        most = _ALL_FOLDS if len(T) < _NUM_HELD_OUT else _MAX_FOLDS
        for fold in range(min(math.ceil(_NUM_HELD_OUT / number), most) if self.n_folds is None else self.n_folds):
            held_out = torch.zeros(len(T), dtype=torch.bool)
            held_out[order.roll(-fold * number)[:number]] = True
            unobserved = T[~held_out].isnan().all(0)
            yield held_out & T[:, unobserved].isnan().all(1)  # each column keeps an observed entry

    def _hidden(self, T: Tensor, fold: int) -> Bool[Tensor, "V D"]:
        """Entries of held-out rows to hide: from a tenth to six tenths of a row, and not all."""
        generator = torch.Generator().manual_seed(self._seed + fold)
        share = 0.1 + 0.5 * torch.rand(len(T), 1, generator=generator)
        hidden = (torch.rand(T.shape, generator=generator) < share) & ~T.isnan()
        first = ~T.isnan() & ((~T.isnan()).cumsum(1) == 1)
        return hidden & ~((hidden | T.isnan()).all(1, keepdim=True) & first)

    def _weights_of_hidden(self, table: KnownTable, folds: list[tuple[int, Tensor]]) -> Float[Tensor, " hidden"] | None:
        """Weights of the rows of the hidden entries of all folds; None if rows have none."""
        if table.known is None or table.known.weight is None:
            return None
        weight = table.known.weight[:, None].expand_as(table.values)
        return torch.cat([weight[rows][self._hidden(table.values[rows], fold)] for fold, rows in folds])

    def _warp_of(self, size: Candidate) -> YeoJohnsonTransform:
        """Transformation of the columns of a candidate."""
        return _linear(self.warp_) if isinstance(size, Gaussians) and not size.power else self.warp_

    def _fit_and_score(
        self, table: KnownTable, dtype: torch.dtype, size: Candidate, fold: int, held_out: Bool[Tensor, " N"]
    ) -> tuple[_Fit | GaussianMixture, Float[Tensor, "J hidden"]]:
        """Fit a candidate to the rows of a fold; compute log densities of hidden entries of the others, for each factor."""
        warp = self._warp_of(size)
        T = table.transformed(warp)
        rows = T.at(held_out)
        hidden = self._hidden(rows.values, fold)
        fitted = self._fit(T.at(~held_out).to(dtype), size, fold)
        if not len(rows.values):
            return fitted, rows.values.new_zeros(len(_FACTORS), 0)
        moments = self._moments(fitted, rows._replace(values=rows.values.masked_fill(hidden, torch.nan)))
        log_prob = _log_prob(*moments, rows) + warp.log_abs_det_jacobian(table.values[held_out], rows.values)
        return fitted, log_prob[:, hidden]

    def _fit(self, T: KnownTable, size: Candidate, fold: int) -> _Fit | GaussianMixture:
        seed = self._seed + fold
        if isinstance(size, Gaussians):
            Y = T.values.double()
            drawn = torch.randperm(len(Y), generator=torch.Generator().manual_seed(seed))[: most_rows(Y, size.number)]
            return gaussian_mixture(Y[drawn.sort().values], size.number, seed=seed)
        latent_dim, rank = size
        with own_parameters(self._local), seeded(seed):
            model = BayesianGPLVM.from_data(T.values, latent_dim, rank=rank, rows=T.known, seed=seed)
            guide, _ = fit_gplvm(
                model,
                T.values,
                max_iter=self.max_iter,
                batch_size=self.batch_size,
                learning_rate=self.learning_rate,
                seed=seed,
                verbose=self.verbose,
            )
            return _Fit(model, guide, model.training_prior(guide, T.values, seed=seed))

    def _moments(self, fitted: _Fit | GaussianMixture, T: KnownTable) -> tuple[Float[Tensor, "S B D"], Float[Tensor, "S B D"]]:
        """Means and standard deviations, without known errors, of the entries of rows at points of equal weight."""
        if isinstance(fitted, GaussianMixture):
            parts = _component_moments(fitted, T.values)
        else:
            parts = self._latent_moments(fitted, T)
        mean, variance = (torch.cat(part, 1) for part in zip(*parts, strict=True))
        return mean, variance.clamp_min(1e-10).sqrt()

    def _latent_moments(self, fitted: _Fit, T: KnownTable) -> list[list[Tensor]]:
        """Means and variances of the entries of parts of the rows, at points of their latents."""
        model, guide, _ = fitted
        parts = []
        with own_parameters(self._local), seeded(self._seed):
            T = T.to(model.mean.dtype).without_errors_of_missing_entries()
            for idx in torch.arange(len(T.values)).split(_CHUNK_SIZE):
                part = T.at(idx)
                latents, every = self._latents(fitted, part), part.at(torch.arange(len(idx)).repeat(_NUM_POINTS))
                with torch.no_grad():
                    y = model.predictive(guide, latents.flatten(0, 1), rows=every.known).condition(every.values)
                    parts.append([moment.unflatten(0, (_NUM_POINTS, -1)).double() for moment in y.moments()])
        return parts

    def _latents(self, fitted: _Fit, T: KnownTable) -> Float[Tensor, "S B Q"]:
        """Points of the posterior of the latents of rows, or of the prior for rows without observed entries."""
        model, guide, shared = fitted
        own = None if T.known is None else T.known.prior
        is_observed = ~T.values.isnan().all(1)
        points = T.values.new_empty(_NUM_POINTS, len(T.values), model.latent_dim)
        if is_observed.any():
            some, prior = T.at(is_observed), shared if own is None else None  # rows may have priors of their own
            q = model.infer_latents(guide, some.values, prior=prior, rows=some.known, seed=self._seed)
            points[:, is_observed] = posterior_points(q, _NUM_POINTS)
        if not is_observed.all():
            if own is None:
                prior = shared.expand([int((~is_observed).sum())])
            else:
                loc, scale = (part[~is_observed] for part in own)
                prior = torch.distributions.MultivariateNormal(loc, scale_tril=torch.diag_embed(scale))
            points[:, ~is_observed] = posterior_points(prior, _NUM_POINTS)
        return points

    def predictive(self, X: Any, rows: RowArguments | None = None) -> Prediction:
        """Predict the entries of training or new rows, in the units of the data; observed entries are point masses.

        A row without observed entries has the prediction of the prior, the mixture of the training latents.

        :param X: rows [N, D], NaN where missing: an array, or a data frame, whose labels the prediction keeps.
        :param rows: known quantities of these rows, or one row of them for all, as for :meth:`fit`.
        :raises ValueError: for infinite entries, or other known quantities than those of the training rows.
        """
        check_is_fitted(self)
        labels = labels_of(X)
        X = self._validated(X, reset=False)
        return self._predictive(X, labels, self._known_of_new(rows, len(X)))

    def _known_of_new(self, rows: RowArguments | None, num_rows: int) -> RowArguments | None:
        """Expand known quantities to all rows; raise for one that training rows did not have."""
        known = scaled_rows(rows, None, self.warp_.scale, num_rows)
        if known is not None and (other := sorted(known.parts().keys() - self._row_parts)):
            raise ValueError(f"expected no {other} of rows, since training rows have none, got some; leave them out")
        return known

    def _predictive(self, X: np.ndarray, labels: Labels, known: RowArguments | None) -> Prediction:
        """Predict the entries of rows that were validated."""
        Y = torch.tensor(X, dtype=torch.float64)
        check_values(Y, rows=False, columns=False, name="X")
        predictions, weights, dims = [], [], labels.dims or _DIMS
        for size, fits in self.fits_.items():
            shares, warp = self._factors[size], self._warp_of(size)
            T = KnownTable(Y, known).transformed(warp)
            chosen = shares > _LEAST_WEIGHT * shares.sum()
            factors = torch.tensor(_FACTORS).double()[chosen], (shares / shares[chosen].sum())[chosen]
            for fitted in fits:
                y = WarpedNormal(*self._moments(fitted, T), warp, *factors, T.error)
                predictions.append(Prediction([y], dims=dims, coords=labels.coords(dims)))
                weights.append(self.weights_[size])
        return Prediction.pool(predictions, weights).with_observed(Y)

    def transform(
        self, X: Any, return_std: bool = False, rows: RowArguments | None = None
    ) -> Float[np.ndarray, "N D"] | tuple[Float[np.ndarray, "N D"], Float[np.ndarray, "N D"]]:
        """Replace missing entries by their predictive means.

        :param X: rows [N, D], NaN where missing.
        :param return_std: whether to return the predictive standard deviations too, zero for observed entries.
        :param rows: known quantities of these rows, or one row of them for all, as for :meth:`fit`.
        """
        check_is_fitted(self)
        X = self._validated(X, reset=False)
        known = self._known_of_new(rows, len(X))
        gapped = np.isnan(X).any(1)
        own = None if known is None else known[torch.as_tensor(gapped)]
        return fill_missing(X, gapped, lambda: self._predictive(X[gapped], Labels(), own), return_std=return_std)

    def fit_transform(self, X: Any, y: Any = None, rows: RowArguments | None = None) -> Any:
        """Fit the candidates, and replace missing entries by their predictive means.

        :param X: rows [N, D], NaN where missing.
        :param y: ignored.
        :param rows: as for :meth:`fit`.
        """
        return self.fit(X, y, rows).transform(X, rows=rows)


def _used_rows(X: Float[np.ndarray, "N D"], rows: RowArguments | None) -> tuple[Float[Tensor, "R D"], RowArguments | None]:
    """Return rows with an observed entry and a positive weight, and what is known of them; raise unless they can be used."""
    known = scaled_rows(rows, None, torch.tensor(X).double(), len(X))
    if known is not None and known.exposure is not None:
        raise TypeError(
            "expected rows without exposure, since the noise is Gaussian, got one; leave it out, or divide the data by it"
        )
    is_used = ~np.isnan(X).all(1)
    if known is not None and known.weight is not None:
        is_used &= known.weight.numpy() > 0.0
    Y = torch.tensor(X[is_used])
    if len(Y) < _LEAST_ROWS:
        raise ValueError(f"expected {_LEAST_ROWS} rows of X or more with an observed entry, got {len(Y)}; add rows")
    check_values(Y, rows=False, name="X")
    return Y, None if known is None else known[torch.as_tensor(is_used)]


def _warp(Y: Float[Tensor, "N D"], *, is_linear: bool) -> YeoJohnsonTransform:
    """Transformation that makes columns more normal, or standardises them alone."""
    warp = YeoJohnsonTransform.from_data(Y)
    return _linear(warp) if is_linear else warp


def _linear(warp: YeoJohnsonTransform) -> YeoJohnsonTransform:
    """Standardisation of a transformation, without its powers."""
    zeros, ones = torch.zeros_like(warp.scale), torch.ones_like(warp.scale)
    return YeoJohnsonTransform(ones, warp.shift, warp.scale, warp.limits, (zeros, ones))


def _component_moments(mixture: GaussianMixture, T: Float[Tensor, "B D"]) -> list[list[Tensor]]:
    """Means and variances of the entries of parts of the rows, in components that are chosen by their probabilities."""
    parts = []
    for part in mixture.chunks(T):
        rows = mixture.condition(part)
        chosen = stratified(rows.log_weight.exp(), _NUM_POINTS)[..., None]
        moments = rows.mean, rows.variance()
        parts.append([moment.take_along_dim(chosen, 1).transpose(0, 1) for moment in moments])
    return parts


def _weights(
    log_prob: dict[tuple[Candidate, float], Tensor], weight_of_entries: Tensor | None
) -> dict[tuple[Candidate, float], float]:
    """Stacking weights of sizes and factors; equal weights of the sizes with a factor of 1 if no entry is held out."""
    if all(not len(values) for values in log_prob.values()):
        number = len(log_prob) // len(_FACTORS)
        return {(size, factor): float(factor == 1.0) / number for size, factor in log_prob}
    return stacking_weights(log_prob, weight=weight_of_entries, tolerance=_STACKING_TOLERANCE)


def _log_prob(loc: Float[Tensor, "S B D"], scale: Float[Tensor, "S B D"], T: KnownTable) -> Float[Tensor, "J B D"]:
    """Log densities of entries under an equal mixture of Gaussians, for each factor on the standard deviations."""
    values, error = T.values.nan_to_num(), 0.0 if T.error is None else T.error.square()
    stddevs = (((factor * scale).square() + error).sqrt() for factor in _FACTORS)
    return torch.stack([Normal(loc, stddev).log_prob(values).logsumexp(0) - np.log(len(loc)) for stddev in stddevs])
