"""Bayesian GPLVM as a scikit-learn transformer."""

import math
from copy import deepcopy
from typing import Any

import numpy as np
import pyro
import torch
from jaxtyping import Float
from numpy.random import RandomState
from sklearn.base import ClassNamePrefixFeaturesOutMixin, TransformerMixin
from sklearn.preprocessing import StandardScaler
from sklearn.utils import check_array, check_random_state
from sklearn.utils.validation import check_is_fitted, validate_data
from torch import Tensor
from torch.distributions import MixtureSameFamily, MultivariateNormal, Normal

from pyro_lvgp._utils.seeding import seeded
from pyro_lvgp._utils.validation import check_sizes, check_values
from pyro_lvgp.guides import MeanFieldGuide
from pyro_lvgp.infer import FitResult
from pyro_lvgp.likelihoods import Gaussian, Likelihood, RowLikelihood
from pyro_lvgp.models import BayesianGPLVM
from pyro_lvgp.ops.quasi_monte_carlo import qmc_normal
from pyro_lvgp.sklearn._pyro_state import own_parameters
from pyro_lvgp.sklearn._rows import CHECKS, RowsEstimator, fit_gplvm

__all__ = ["GPLVM"]

_CHUNK_SIZE = 1000  # rows, which bounds the memory for new rows
_NUM_DRAWS = 100  # of the latents of a row, for its log evidence


class GPLVM(ClassNamePrefixFeaturesOutMixin, TransformerMixin, RowsEstimator):
    r"""Bayesian Gaussian process latent variable model as a transformer.

    The estimator fits a :class:`~pyro_lvgp.models.BayesianGPLVM` with a :class:`~pyro_lvgp.guides.MeanFieldGuide`:

    .. math::

        x_n \sim N(0, I_Q), \qquad f_d \sim GP(0, k), \qquad y_{nd} \sim p\big(y \mid f_d(x_n)\big).

    NaN marks a missing entry, in training data and in new rows; ``inverse_transform(transform(X))`` imputes missing entries.
    With the default likelihood each column is standardised; with other likelihoods data are not scaled.  The fit has the
    floating-point precision of the data.

    :param n_components: number Q of latent dimensions.
    :param likelihood: likelihood p(y | f) of :mod:`pyro_lvgp.likelihoods`; a Gaussian by default.
    :param n_inducing: number of inducing points; it is reduced to the number of rows if there are fewer.
    :param max_iter: number of steps of Adam.
    :param batch_size: number of rows in a mini-batch; None for all rows.
    :param learning_rate: initial learning rate of Adam, which falls to zero along a cosine.
    :param random_state: seed of initial values, mini-batches and draws.
    :param verbose: whether to show a progress bar.

    A fitted estimator has the attributes

    - ``embedding_``: fitted means [N, Q] of the latents of the training rows, which ``transform`` reproduces approximately;
    - ``model_``, ``guide_`` and ``history_``: the model, its guide, and the bounds of the fit;
    - ``scaler_``: scaler of the columns;
    - ``n_iter_``: number of steps taken;
    - ``n_features_in_``, and ``feature_names_in_`` if columns have names.

    A fitted estimator can be pickled, and used from several threads, whose calls run one after the other
    (:data:`~pyro_lvgp.infer.pyro_lock`).

    Source: Titsias and Lawrence (2010), "Bayesian Gaussian process latent variable model".

    >>> from sklearn.datasets import load_iris
    >>> gplvm = GPLVM(n_components=2, max_iter=20, random_state=0)
    >>> gplvm.fit_transform(load_iris().data).shape
    (150, 2)
    """

    embedding_: Float[np.ndarray, "N Q"]
    model_: BayesianGPLVM
    guide_: MeanFieldGuide
    history_: FitResult
    scaler_: StandardScaler

    def __init__(
        self,
        n_components: int = 2,
        *,
        likelihood: Likelihood | None = None,
        n_inducing: int = 50,
        max_iter: int = 2000,
        batch_size: int | None = 256,
        learning_rate: float = 0.02,
        random_state: int | RandomState | None = None,
        verbose: bool | int = False,
    ):
        self.n_components = n_components
        self.likelihood = likelihood
        self.n_inducing = n_inducing
        self.max_iter = max_iter
        self.batch_size = batch_size
        self.learning_rate = learning_rate
        self.random_state = random_state
        self.verbose = verbose

    def fit(self, X: Any, y: Any = None) -> "GPLVM":
        """Fit the latents of all rows, and the functions that map latents to columns.

        :param X: rows [N, D], NaN where missing.
        :param y: ignored.
        :raises ValueError: for rows or columns without observed entries, infinite entries, entries outside the support of the
            likelihood, or sizes that are not positive.
        """
        check_sizes(n_components=self.n_components, n_inducing=self.n_inducing, max_iter=self.max_iter)
        X = validate_data(self, X, ensure_min_samples=2, **CHECKS)
        check_values(torch.tensor(X), name="X")
        standardised = self.likelihood is None
        self.scaler_ = StandardScaler(with_mean=standardised, with_std=standardised)
        Y = torch.tensor(self.scaler_.fit_transform(X))
        self._seed = int(check_random_state(self.random_state).randint(np.iinfo(np.int32).max))
        self._local = pyro.settings.get("module_local_params")
        with own_parameters(self._local), seeded(self._seed):
            likelihood = Gaussian() if self.likelihood is None else deepcopy(self.likelihood)
            self.model_ = BayesianGPLVM.from_data(
                Y, self.n_components, num_inducing=min(self.n_inducing, len(Y)), likelihood=likelihood, seed=self._seed
            )
            self.guide_, self.history_ = fit_gplvm(
                self.model_,
                Y,
                max_iter=self.max_iter,
                batch_size=self.batch_size,
                learning_rate=self.learning_rate,
                seed=self._seed,
                verbose=bool(self.verbose),
            )
            self.n_iter_ = len(self.history_.losses)
            self.embedding_ = self.guide_.median(Y)["X"].numpy(force=True)
        return self

    def transform(self, X: Any) -> Float[np.ndarray, "N Q"]:
        """Compute the posterior means of the latents of new or training rows, by Laplace's approximation.

        :param X: rows [N, D], NaN where missing.
        :raises ValueError: for rows without observed entries.
        """
        Y = self._rows(X)
        with own_parameters(self._local):
            prior = self.model_.training_prior(self.guide_, seed=self._seed)
            parts: list[Any] = [
                self.model_.infer_latents(self.guide_, rows, prior=prior, seed=self._seed) for rows in Y.split(_CHUNK_SIZE)
            ]
        return torch.cat([part.mean for part in parts]).numpy(force=True)

    def inverse_transform(self, X: Any) -> Float[np.ndarray, "N D"]:
        """Compute predictive means at latents.

        :param X: latents [N, Q].
        """
        check_is_fitted(self)
        latents = torch.tensor(check_array(X, dtype=CHECKS["dtype"])).to(self.model_.mean)
        with own_parameters(self._local), seeded(self._seed):
            Y = self.model_.predict(self.guide_, latents).mean
        return self.scaler_.inverse_transform(Y.numpy(force=True))

    def score_samples(self, X: Any) -> Float[np.ndarray, " N"]:
        r"""Estimate the log evidence of each row under the fitted model, in nats; higher is better.

        .. math::

            \log p(y_n) = \log \int p(x) \prod_{d\ \text{observed}} p(y_{nd} \mid x)\, dx
            \approx \log \sum_c \frac{\pi_{nc}}{S} \sum_s \frac{p(x_{ncs})\, p(y_n \mid x_{ncs})}{q_n(x_{ncs})},
            \qquad q_n(x) = \sum_c \pi_{nc}\, q_{nc}(x)

        The functions are marginalised in p(y | x), entry by entry.  The prior p(x) is
        :meth:`~pyro_lvgp.models.BayesianGPLVM.training_prior`.  It is one half of the proposal q, which bounds the importance
        weights; the other half are the Gaussians of the posterior by Laplace's approximation, which :meth:`transform` uses.
        The S = 100 draws of a component have the same standardised values for all rows.  The expectation of the estimate is a
        lower bound, and its error is some hundredths of a nat for most rows.  Densities are those of the columns before they
        are standardised.

        :param X: rows [N, D], NaN where missing.
        :raises ValueError: for rows without observed entries.

        Source: Owen and Zhou (2000), "Safe and effective importance sampling", for draws of a mixture by components.
        """
        Y = self._rows(X)
        with own_parameters(self._local), seeded(self._seed):
            prior: Any = self.model_.training_prior(self.guide_, seed=self._seed)
            draws = prior.sample((_NUM_DRAWS,))
            noise = qmc_normal(_NUM_DRAWS, Normal(torch.zeros_like(draws[0]), 1.0))
            parts = [self._log_evidence(rows, prior, draws, noise) for rows in Y.split(_CHUNK_SIZE)]
        log_scale = np.log(self.scaler_.scale_) if self.scaler_.with_std else np.zeros(Y.shape[1])
        return torch.cat(parts).numpy(force=True) - (~np.isnan(Y.numpy(force=True)) * log_scale).sum(1)

    def score(self, X: Any, y: Any = None) -> float:
        """Compute the mean of :meth:`score_samples`, for the selection of models; higher is better.

        :param X: rows [N, D], NaN where missing.
        :param y: ignored.
        """
        return float(self.score_samples(X).mean())

    @torch.no_grad()
    def _log_evidence(self, Y: Tensor, prior: Any, draws: Tensor, noise: Tensor) -> Tensor:
        """Estimate the log evidence of standardised rows by draws of the prior, and of Gaussians with the given noise."""
        posterior: Any = self.model_.infer_latents(self.guide_, Y, prior=prior, seed=self._seed)
        gaussians, log_shares = [posterior], Y.new_zeros(len(Y), 1)
        if isinstance(posterior, MixtureSameFamily):
            parts: Any = posterior.component_distribution
            log_shares = posterior.mixture_distribution.logits.log_softmax(-1)
            moments = zip(parts.mean.unbind(1), parts.scale_tril.unbind(1), strict=True)
            gaussians = [MultivariateNormal(mean, scale_tril=scale_tril) for mean, scale_tril in moments]
        proposals = [(-math.log(2.0), draws[:, None].expand(-1, len(Y), -1))]
        for log_share, each in zip(log_shares.T, gaussians, strict=True):
            proposals.append((log_share - math.log(2.0), each.mean + (each.scale_tril @ noise[:, None, :, None]).squeeze(-1)))
        value, observed = torch.nan_to_num(Y, self.model_.likelihood.fill_value), ~torch.isnan(Y)
        terms = []
        for log_share, x in ((log_share, x) for log_share, many in proposals for x in many):
            y = self.model_.predictive(self.guide_, x)
            if isinstance(y.likelihood, RowLikelihood):
                log_p = y.likelihood.log_predictive_density_of_rows(value, observed, y.f_mean, y.f_variance, y.params)
            else:
                log_p = torch.where(observed, y.log_prob_of_entries(value), 0.0).sum(-1)
            log_prior = prior.log_prob(x)
            log_q = torch.logaddexp(log_prior, posterior.log_prob(x)) - math.log(2.0)
            terms.append(log_share + log_p + log_prior - log_q)
        return torch.stack(terms).logsumexp(0) - math.log(_NUM_DRAWS)

    def _rows(self, X: Any) -> Tensor:
        """Check new rows, and scale them."""
        check_is_fitted(self)
        X = validate_data(self, X, reset=False, **CHECKS)
        check_values(torch.tensor(X), columns=False, name="X")
        return torch.tensor(self.scaler_.transform(X)).to(self.model_.mean)

    @property
    def _n_features_out(self) -> int:
        return self.embedding_.shape[1]
