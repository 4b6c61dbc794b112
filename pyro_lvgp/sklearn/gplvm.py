"""Bayesian GPLVM as a scikit-learn transformer."""

import math
from typing import Any, Literal

import numpy as np
import torch
from jaxtyping import Float
from numpy.random import RandomState
from torch import Tensor
from torch.distributions import MixtureSameFamily, MultivariateNormal, Normal

from pyro_lvgp._utils.construction import copy_with_construction
from pyro_lvgp._utils.seeding import seeded
from pyro_lvgp._utils.validation import check_sizes
from pyro_lvgp.guides import MeanFieldGuide
from pyro_lvgp.likelihoods import Likelihood, LikelihoodName, RowLikelihood
from pyro_lvgp.models import BayesianGPLVM, RowArguments
from pyro_lvgp.ops.quasi_monte_carlo import qmc_normal
from pyro_lvgp.sklearn._latent_transformer import Fitted, LatentTransformer
from pyro_lvgp.sklearn._pyro_state import own_parameters
from pyro_lvgp.sklearn._rows import chunks, fit_gplvm, scaled_rows

__all__ = ["GPLVM"]

_GENEROUS_DIM = 10  # of the first fit of n_components="auto"
_LEAST_RELEVANCE, _LEAST_VARIANCE = 1.0 / 3.0, 0.05
_NUM_DRAWS = 100  # of the latents of a row, for its log evidence
_ROWS_AT_ONCE = 1000  # draws of latents whose densities are computed together, which bounds the memory


class GPLVM(LatentTransformer):
    r"""Bayesian Gaussian process latent variable model as a transformer.

    The estimator fits a :class:`~pyro_lvgp.models.BayesianGPLVM` with a :class:`~pyro_lvgp.guides.MeanFieldGuide`:

    .. math::

        x_n \sim N(0, I_Q), \qquad f_d \sim GP(0, k), \qquad y_{nd} \sim p\big(y \mid f_d(x_n)\big).

    NaN marks a missing entry, in training data and in new rows; ``inverse_transform(transform(X))`` imputes missing entries.
    Rows without observed entries are left out of the fit, and have the mean of the prior as latents.
    With the default likelihood each column is standardised; with other likelihoods data are not scaled.  The fit has the
    floating-point precision of the data.

    :param n_components: number Q of latent dimensions; ``"auto"`` fits twice: with ten dimensions, or one for each column if
        these are fewer, and then with as many as had a relevance, 1 / lengthscale, of a third of the largest or more, and
        latents that differ between rows.  A dimension of a third of the relevance adds a ninth of the variance.
    :param likelihood: likelihood p(y | f) of :mod:`pyro_lvgp.likelihoods`, or its name
        (:func:`~pyro_lvgp.likelihoods.likelihood_by_name`); a Gaussian by default.
    :param n_inducing: number of inducing points; it is reduced to the number of rows if there are fewer.
    :param max_iter: number of steps of Adam.
    :param batch_size: number of rows in a mini-batch; None for all rows.
    :param learning_rate: initial learning rate of Adam, which falls to zero along a cosine.
    :param warm_start: whether a further call of ``fit`` continues from the previous one, for the same rows in the same order,
        such as with more steps or another learning rate.
    :param device: device of the fit, such as ``"cuda"``; None for torch's default device.
    :param random_state: seed of initial values, mini-batches and draws.
    :param verbose: whether to show a progress bar.

    A fitted estimator has the attributes

    - ``embedding_``: fitted means [N, Q] of the latents of the training rows, which ``transform`` reproduces approximately;
    - ``model_``, ``guide_`` and ``history_``: the model, its guide, and the bounds of the fit;
    - ``scaler_``: scaler of the columns;
    - ``n_iter_``: number of steps taken;
    - ``n_features_in_``, and ``feature_names_in_`` if columns have names.

    A fitted estimator can be pickled, written to a file without code (:meth:`save`), and used from several threads, whose
    calls run one after the other (:data:`~pyro_lvgp.infer.pyro_lock`).

    Source: Titsias and Lawrence (2010), "Bayesian Gaussian process latent variable model".

    >>> from sklearn.datasets import load_iris
    >>> gplvm = GPLVM(n_components=2, max_iter=20, random_state=0)
    >>> gplvm.fit_transform(load_iris().data).shape
    (150, 2)
    >>> mean, stddev = gplvm.inverse_transform([[0.0, 0.0]], return_std=True)
    >>> mean.shape, stddev.shape
    ((1, 4), (1, 4))
    """

    model_: BayesianGPLVM
    guide_: MeanFieldGuide

    def __init__(
        self,
        n_components: int | Literal["auto"] = 2,
        *,
        likelihood: Likelihood | LikelihoodName | None = None,
        n_inducing: int = 50,
        max_iter: int = 2000,
        batch_size: int | None = 256,
        learning_rate: float = 0.02,
        warm_start: bool = False,
        device: str | torch.device | None = None,
        random_state: int | RandomState | None = None,
        verbose: bool | int = False,
    ):
        self.n_components = n_components
        self.likelihood = likelihood
        self.n_inducing = n_inducing
        self.max_iter = max_iter
        self.batch_size = batch_size
        self.learning_rate = learning_rate
        self.warm_start = warm_start
        self.device = device
        self.random_state = random_state
        self.verbose = verbose

    def _fit_model(
        self, Y: Float[Tensor, "N D"], likelihood: Likelihood, previous: Fitted | None, rows: RowArguments | None
    ) -> Fitted:
        check_sizes(n_inducing=self.n_inducing)
        if self.n_components == "auto" and rows is not None and rows.prior is not None:
            raise ValueError(
                f"expected the number of latent dimensions of the priors of rows as n_components, {rows.prior[0].shape[1]}, "
                'got "auto"; pass the number'
            )
        if self.n_components != "auto":
            check_sizes(n_components=self.n_components)
        elif previous is None:
            generous = min(_GENEROUS_DIM, Y.shape[1], len(Y) - 1)
            first = self._fit_dim(Y, copy_with_construction(likelihood), max(generous, 1), rows)
            return self._fit_dim(Y, likelihood, _num_relevant(first), rows)
        if previous is None:
            return self._fit_dim(Y, likelihood, self.n_components, rows)
        if self.n_components not in ("auto", previous.model.latent_dim):
            raise ValueError(
                f"expected the n_components={previous.model.latent_dim} of the previous fit, which warm_start=True continues, "
                f"got {self.n_components}; set warm_start=False"
            )
        return self._continue(previous.model, Y, previous.guide)

    def _fit_dim(self, Y: Tensor, likelihood: Likelihood, latent_dim: Any, rows: RowArguments | None) -> Fitted:
        """Fit a new model of a number of latent dimensions."""
        options: Any = {"num_inducing": min(self.n_inducing, len(Y)), "likelihood": likelihood, "rows": rows}
        model = BayesianGPLVM.from_data(Y, latent_dim, seed=self._seed, **options)
        return self._continue(model, Y)

    def _continue(self, model: BayesianGPLVM, Y: Tensor, guide: MeanFieldGuide | None = None) -> Fitted:
        guide, history = fit_gplvm(
            model,
            Y,
            max_iter=self.max_iter,
            batch_size=self.batch_size,
            learning_rate=self.learning_rate,
            seed=self._seed,
            verbose=bool(self.verbose),
            guide=guide,
        )
        return Fitted(model, guide, history)

    def score_samples(self, X: Any, rows: RowArguments | None = None) -> Float[np.ndarray, " N"]:
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
        are standardised.  A row without observed entries has the log evidence 0.

        :param X: rows [N, D], NaN where missing.
        :param rows: known quantities of these rows, if the training rows have them, as for :meth:`fit`.  A prior of each row
            takes the place of the mixture.

        Source: Owen and Zhou (2000), "Safe and effective importance sampling", for draws of a mixture by components.
        """
        Y, is_observed = self._scaled(X)
        log_evidence = Y.new_zeros(len(Y))
        known = scaled_rows(rows, self.scaler_.scale_, Y, len(Y))
        with own_parameters(self._local), seeded(self._seed):
            shared = self._prior_of(None)
            draws = shared.sample((_NUM_DRAWS,))
            noise = qmc_normal(_NUM_DRAWS, Normal(torch.zeros_like(draws[0]), 1.0))
            for idx in chunks(is_observed):
                own = None if known is None else known[idx]
                has_prior = own is not None and own.prior is not None
                prior = self._prior_of(own) if has_prior else shared
                of_prior = prior.sample((_NUM_DRAWS,)) if has_prior else draws[:, None].expand(-1, len(idx), -1)
                log_evidence[idx] = self._log_evidence(Y[idx], prior, of_prior, noise, own)
        log_scale = np.log(self.scaler_.scale_) if self.scaler_.with_std else np.zeros(Y.shape[1])
        return log_evidence.numpy(force=True) - (~np.isnan(Y.numpy(force=True)) * log_scale).sum(1)

    def score(self, X: Any, y: Any = None, rows: RowArguments | None = None) -> float:
        """Compute the mean of :meth:`score_samples`, for the selection of models; higher is better.

        :param X: rows [N, D], NaN where missing.
        :param y: ignored.
        :param rows: as for :meth:`score_samples`.
        """
        return float(self.score_samples(X, rows).mean())

    @torch.no_grad()
    def _log_evidence(self, Y: Tensor, prior: Any, draws: Tensor, noise: Tensor, rows: RowArguments | None) -> Tensor:
        """Estimate the log evidence of standardised rows by draws of the prior, and of Gaussians with the given noise."""
        posterior: Any = self._infer(Y, prior, rows)
        gaussians, log_shares = [posterior], Y.new_zeros(len(Y), 1)
        if isinstance(posterior, MixtureSameFamily):
            parts: Any = posterior.component_distribution
            log_shares = posterior.mixture_distribution.logits.log_softmax(-1)
            moments = zip(parts.mean.unbind(1), parts.scale_tril.unbind(1), strict=True)
            gaussians = [MultivariateNormal(mean, scale_tril=scale_tril) for mean, scale_tril in moments]
        proposals = [(-math.log(2.0), draws)]
        for log_share, each in zip(log_shares.T, gaussians, strict=True):
            proposals.append((log_share - math.log(2.0), each.mean + (each.scale_tril @ noise[:, None, :, None]).squeeze(-1)))
        values, seen = torch.nan_to_num(Y, self.model_.likelihood.fill_value), ~torch.isnan(Y)
        at_once = max(_ROWS_AT_ONCE // len(Y), 1)
        terms = []
        for log_share, x in ((log_share, x) for log_share, many in proposals for x in many.split(at_once)):
            idx = torch.arange(len(Y), device=Y.device).repeat(len(x))
            own = None if rows is None else rows[idx]
            y = self.model_.predictive(self.guide_, x.flatten(0, 1), rows=own)
            value, observed = values[idx], seen[idx]
            if isinstance(y.likelihood, RowLikelihood):
                log_p = y.likelihood.log_predictive_density_of_rows(value, observed, y.f_mean, y.f_variance, y.params)
            else:
                log_p = torch.where(observed, y.log_prob_of_entries(value), 0.0).sum(-1)
            log_prior = prior.log_prob(x)
            log_q = torch.logaddexp(log_prior, posterior.log_prob(x)) - math.log(2.0)
            terms.append(log_share + log_p.view_as(log_prior) + log_prior - log_q)
        return torch.cat(terms).logsumexp(0) - math.log(_NUM_DRAWS)


def _num_relevant(fitted: Fitted) -> int:
    """Number of dimensions whose relevance is a third of the largest or more, and whose latents differ between rows."""
    relevance = 1.0 / fitted.model.kernel.lengthscale.detach()
    is_relevant = relevance >= _LEAST_RELEVANCE * relevance.max()
    varies = fitted.guide.stored_posterior("X").mean.detach().var(0) >= _LEAST_VARIANCE
    return max(int((is_relevant & varies).sum()), 1)
