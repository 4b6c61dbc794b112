"""Base class of latent variable models of rows: predictions, imputations and latents of new rows under any guide."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import torch
from jaxtyping import Int
from pyro import poutine
from torch import Tensor

from pyro_lvgp._utils.argument_types import names_types
from pyro_lvgp._utils.eval_mode import eval_mode
from pyro_lvgp._utils.progress import progress_bar
from pyro_lvgp._utils.pyro_lock import pyro_lock
from pyro_lvgp._utils.seeding import seeded
from pyro_lvgp._utils.tables import Labels, Table, labels_of
from pyro_lvgp._utils.validation import check_index, check_sizes
from pyro_lvgp.distributions.likelihood_predictive import LikelihoodPredictive
from pyro_lvgp.models._given_latents import as_kwargs, global_draws, observed_rows, predictor, rows_given
from pyro_lvgp.models._latent_inference import LatentInference
from pyro_lvgp.models._latent_rows import Guide, Latents
from pyro_lvgp.models.prediction import Prediction
from pyro_lvgp.models.row_arguments import RowArguments

__all__ = ["LatentVariableModel"]


class LatentVariableModel(LatentInference):
    """Base class of models of rows y_n with one latent x_n for each row, in plate ``data`` at dim −1, and shared sites.

    A subclass implements ``forward(y=None, idx=None)`` with the sites ``X`` and ``y``, and :meth:`latent_candidates`, and
    sets the attribute ``likelihood``.  The distribution of ``y`` is ``LikelihoodPredictive(...).rows(...)``.  The class
    implements ``predict``, ``predictive``, ``reconstruct``, ``infer_latents`` and ``impute`` under any guide of all latent
    sites.  These methods run model and guide in evaluation mode: dropout is off, and batches are normalised by running
    statistics.

    :param num_data: number N of rows.
    :param data_dim: number D of columns.
    :param latent_dim: number Q of latent dimensions.

    >>> from pyro_lvgp.guides import MeanFieldGuide
    >>> from pyro_lvgp.models import BayesianGPLVM
    >>> Y = torch.randn(20, 3)
    >>> model = BayesianGPLVM(20, 3, latent_dim=2, num_inducing=5).initialize(Y)
    >>> guide = MeanFieldGuide(model)
    >>> sites = guide(Y)  # fit it here
    >>> model.reconstruct(guide, Y).mean.shape
    torch.Size([20, 3])
    >>> rows = torch.tensor([[0.5, torch.nan, -0.5], [torch.nan, 1.0, torch.nan]])  # new rows
    >>> latents = model.infer_latents(guide, rows, num_steps=10)
    >>> latents.mean.shape, model.predict(guide, latents).variance.shape
    (torch.Size([2, 2]), torch.Size([2, 3]))
    >>> filled = model.impute(guide, rows, latents=latents)
    >>> filled.mean[0, 0].item(), filled.stddev[0, 0].item(), bool(filled.mean.isnan().any())
    (0.5, 0.0, False)
    """

    @names_types
    @pyro_lock
    def predict(
        self,
        guide: Guide,
        X: Latents,
        *,
        rows: RowArguments | None = None,
        num_samples: int = 64,
        seed: int | None = None,
    ) -> Prediction:
        """Predict y at latent positions, or averaged over a distribution of them.

        :param guide: a fitted guide.
        :param X: latent positions [B, Q], a tensor or a table, whose index the prediction has; or a distribution over them,
            such as :meth:`infer_latents` returns.
        :param rows: covariates, exposures and standard errors of the predicted rows, of each or one for all, if the training
            rows have them; priors and weights have no effect here.
        :param num_samples: posterior draws, the components of the mixture.
        :param seed: seed of the draws, which then do not change the global random state; None draws from the global state.
        :raises ValueError: if ``num_samples`` is not positive, latents have another number of dimensions or are not finite, or
            the guide lacks a latent site.
        :raises TypeError: for latents of another dtype than the model's.
        """
        check_sizes(num_samples=num_samples)
        labels = self._labels(None)._replace(index=labels_of(X).index)
        draw_latents, num_rows = self._draws_of(X)
        known = self._checked_rows(rows, num_rows)
        with eval_mode(self, guide), seeded(seed):
            draws = global_draws(self, guide, num_samples)
            predicted = (rows_given(self, globals_, draw_latents(), known) for globals_ in draws)
            return self._prediction(predicted, num_samples, num_rows, labels)

    @names_types
    @pyro_lock
    def reconstruct(
        self,
        guide: Guide,
        Y: Table,
        idx: Int[Tensor, " B"] | None = None,
        *,
        rows: RowArguments | None = None,
        num_samples: int = 64,
        seed: int | None = None,
    ) -> Prediction:
        """Predict training rows from their own latents.

        :param guide: a fitted guide.
        :param Y: training rows, a tensor or a table (:func:`~pyro_lvgp.tables.as_tensor`), whose labels the prediction has.
        :param idx: their indices; None for all rows.
        :param rows: arguments in place of those that the rows have in training, such as covariates of one batch for all.
        :param num_samples: posterior draws, the components of the mixture.
        :param seed: seed of the draws, which then do not change the global random state; None draws from the global state.
        :raises ValueError: if ``num_samples`` is not positive, the rows do not fit, or the guide lacks a latent site.
        """
        check_sizes(num_samples=num_samples)
        labels, (Y,) = self._labels(Y), self.as_data(Y)
        self._check_rows(Y)
        check_index(idx, len(Y), self.num_data)
        self._check_are_training_rows(guide, Y, idx)
        idx = torch.arange(len(Y), device=Y.device) if idx is None else idx
        known = None if rows is None else self._replaced_rows(idx, rows)

        def predicted() -> Iterator[LikelihoodPredictive]:
            for _ in progress_bar(range(num_samples), "reconstruction"):
                with torch.no_grad():
                    draw = poutine.trace(guide).get_trace(Y, idx)
                    model = poutine.trace(poutine.replay(self, draw))
                    yield observed_rows(model.get_trace(None, idx, **as_kwargs(known)), draw.nodes)

        with eval_mode(self, guide), seeded(seed):
            labels = labels if labels.index is not None else labels._replace(index=idx)
            return self._prediction(predicted(), num_samples, len(Y), labels)

    @names_types
    @pyro_lock
    def predictive(self, guide: Guide, X: Table, *, rows: RowArguments | None = None) -> LikelihoodPredictive:
        r"""Predictive distribution p(y | x) of each entry, of batch shape [B, D] and differentiable in X.

        For a :class:`~pyro_lvgp.likelihoods.RowLikelihood` it is that of each row, of batch shape [B] and event shape [D].

        Sites that the model can marginalise, and at which the guide is Gaussian (inducing outputs ``u``, weights ``a``), are
        marginalised, so that the entries of a row are independent.  All other sites that rows share are drawn once.

        :param guide: a fitted guide.
        :param X: latent positions.
        :param rows: as for :meth:`predict`.
        :raises ValueError: if there are none, they have another number of dimensions or are not finite, or the guide lacks a
            latent site.
        :raises TypeError: for latents of another dtype than the model's.
        """
        X = self._as_latents(X)
        self._check_latents(X)
        known = self._checked_rows(rows, len(X))
        with eval_mode(self, guide):
            return predictor(self, guide, known)(X)

    @names_types
    @pyro_lock
    def impute(
        self,
        guide: Guide,
        Y: Table,
        idx: Int[Tensor, " B"] | None = None,
        *,
        latents: Latents | None = None,
        rows: RowArguments | None = None,
        num_samples: int = 64,
        seed: int | None = None,
    ) -> Prediction:
        """Predict the missing entries of rows; observed entries have their observed value as mean, and variance zero.

        Under a :class:`~pyro_lvgp.likelihoods.RowLikelihood` predictions are given the observed entries of the row, as well as
        its latents.  See :meth:`Prediction.with_observed`.

        :param guide: a fitted guide.
        :param Y: rows, NaN where missing: a tensor or a table, as for :meth:`reconstruct`.
        :param idx: indices of the rows among the training rows; None for all training rows.
        :param latents: latents of new rows, from :meth:`infer_latents`; ``idx`` then has no effect.
        :param rows: as for :meth:`predict` with latents, and else as for :meth:`reconstruct`.
        :param num_samples: posterior draws, the components of the mixture.
        :param seed: seed of the draws, which then do not change the global random state; None draws from the global state.
        :raises ValueError: if ``num_samples`` is not positive, rows and latents do not fit, or the guide lacks a latent site.
        """
        if latents is None:
            filled = self.reconstruct(guide, Y, idx, rows=rows, num_samples=num_samples, seed=seed)
            return filled.with_observed(*self.as_data(Y))
        labels, (Y,), latents = self._labels(Y), self.as_data(Y), self._as_latents(latents)
        self._check_rows(Y)
        self._check_latents(latents, num_rows=len(Y))
        filled = self.predict(guide, latents, rows=rows, num_samples=num_samples, seed=seed)
        filled.dims, filled.coords = _labelled(labels)
        return filled.with_observed(Y)

    def _draws_of(self, X: Latents) -> tuple[Callable[[], Tensor], int]:
        """Return a function that draws latents, or returns given ones, and the number of rows; raise unless they fit."""
        X = self._as_latents(X)
        self._check_latents(X)
        if isinstance(X, torch.distributions.Distribution):
            return X.sample, X.batch_shape[0]
        return lambda: cast(Tensor, X), len(cast(Tensor, X))

    def _prediction(self, rows: Iterator[LikelihoodPredictive], num_samples: int, num_rows: int, labels: Labels) -> Prediction:
        """Mixture of the entries' distributions over draws, of which only moments are stored if the mixture is too large."""
        dims, coords = _labelled(labels)
        return Prediction(
            (_entries(row) for row in rows),
            hold_parts=num_samples * num_rows * self.data_dim <= Prediction.max_size,
            fill_value=self.likelihood.fill_value,
            dims=dims,
            coords=coords,
        )


def _labelled(labels: Labels) -> tuple[tuple[str, str], dict[str, tuple[Sequence[str], Any]]]:
    """Return the dimensions and coordinates of a prediction of rows."""
    dims = labels.dims or ("data", "output")
    return dims, dict(labels.coords(dims))


def _entries(y: LikelihoodPredictive) -> LikelihoodPredictive:
    """Distribution of the entries [1, N, D] for one draw, with the log predictive density as ``log_prob``."""
    params = None if y.params is None else y.params.detach()
    entries = LikelihoodPredictive(y.likelihood, y.f_mean.detach(), y.f_variance.detach(), "fitc", params)
    return entries.expand(torch.Size((1, *entries.batch_shape)))
