"""Bayesian GPLVM as a scikit-learn transformer."""

from copy import deepcopy
from typing import Any, Literal

import torch
from jaxtyping import Float
from numpy.random import RandomState
from torch import Tensor

from pyro_lvgp._utils.validation import check_sizes
from pyro_lvgp.guides import MeanFieldGuide
from pyro_lvgp.likelihoods import Likelihood
from pyro_lvgp.models import BayesianGPLVM
from pyro_lvgp.sklearn._latent_transformer import Fitted, LatentTransformer
from pyro_lvgp.sklearn._rows import fit_gplvm

__all__ = ["GPLVM"]

_GENEROUS_DIM = 10  # of the first fit of n_components="auto"
_LEAST_RELEVANCE, _LEAST_VARIANCE = 1.0 / 3.0, 0.05


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
    :param likelihood: likelihood p(y | f) of :mod:`pyro_lvgp.likelihoods`; a Gaussian by default.
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

    A fitted estimator can be pickled, and used from several threads, whose calls run one after the other
    (:data:`~pyro_lvgp.infer.pyro_lock`).

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
        likelihood: Likelihood | None = None,
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

    def _fit_model(self, Y: Float[Tensor, "N D"], likelihood: Likelihood, previous: Fitted | None) -> Fitted:
        check_sizes(n_inducing=self.n_inducing)
        if self.n_components != "auto":
            check_sizes(n_components=self.n_components)
        elif previous is None:
            generous = min(_GENEROUS_DIM, Y.shape[1], len(Y) - 1)
            first = self._fit_dim(Y, deepcopy(likelihood), max(generous, 1))
            return self._fit_dim(Y, likelihood, _num_relevant(first))
        if previous is None:
            return self._fit_dim(Y, likelihood, self.n_components)
        if self.n_components not in ("auto", previous.model.latent_dim):
            raise ValueError(
                f"expected the n_components={previous.model.latent_dim} of the previous fit, which warm_start=True continues, "
                f"got {self.n_components}; set warm_start=False"
            )
        return self._continue(previous.model, Y, previous.guide)

    def _fit_dim(self, Y: Tensor, likelihood: Likelihood, latent_dim: Any) -> Fitted:
        """Fit a new model of a number of latent dimensions."""
        num_inducing = min(self.n_inducing, len(Y))
        model = BayesianGPLVM.from_data(Y, latent_dim, num_inducing=num_inducing, likelihood=likelihood, seed=self._seed)
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


def _num_relevant(fitted: Fitted) -> int:
    """Number of dimensions whose relevance is a third of the largest or more, and whose latents differ between rows."""
    relevance = 1.0 / fitted.model.kernel.lengthscale.detach()
    is_relevant = relevance >= _LEAST_RELEVANCE * relevance.max()
    varies = fitted.guide.stored_posterior("X").mean.detach().var(0) >= _LEAST_VARIANCE
    return max(int((is_relevant & varies).sum()), 1)
