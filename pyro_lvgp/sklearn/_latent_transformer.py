"""Base of transformers that fit a latent variable model of rows."""

import os
from abc import abstractmethod
from functools import cached_property
from typing import Any, NamedTuple, TypeVar

import numpy as np
import pyro
import pyro.distributions as dist
import torch
from jaxtyping import Bool, Float
from sklearn.base import ClassNamePrefixFeaturesOutMixin, TransformerMixin
from sklearn.preprocessing import StandardScaler
from sklearn.utils import check_array, check_random_state
from sklearn.utils.validation import check_is_fitted
from torch import Tensor

from pyro_lvgp._utils.construction import copy_with_construction
from pyro_lvgp._utils.seeding import seeded
from pyro_lvgp._utils.validation import check_sizes, check_values
from pyro_lvgp.infer import FitResult, load, save
from pyro_lvgp.likelihoods import Gaussian, Likelihood, LikelihoodName, likelihood_by_name
from pyro_lvgp.models import BayesianGPLVM, RandomFeatureLVM, RowArguments
from pyro_lvgp.sklearn._files import describe, restore
from pyro_lvgp.sklearn._pyro_state import own_parameters
from pyro_lvgp.sklearn._rows import CHECKS, RowsEstimator, as_device, chunks, scaled_rows

Transformer = TypeVar("Transformer")


class Fitted(NamedTuple):
    """A fitted model, its guide and the history of the fit."""

    model: Any
    guide: Any
    history: FitResult


class LatentTransformer(ClassNamePrefixFeaturesOutMixin, TransformerMixin, RowsEstimator):
    """Transformer whose latents are those of a :class:`~pyro_lvgp.models.LatentVariableModel`.

    A subclass has the parameters ``likelihood``, ``max_iter``, ``warm_start``, ``device`` and ``random_state``, and implements
    :meth:`_fit_model`.
    """

    embedding_: Float[np.ndarray, "N Q"]
    model_: BayesianGPLVM | RandomFeatureLVM
    guide_: Any
    history_: FitResult
    scaler_: StandardScaler
    likelihood: Likelihood | LikelihoodName | None
    max_iter: int
    warm_start: bool
    device: Any
    random_state: Any

    @abstractmethod
    def _fit_model(
        self, Y: Float[Tensor, "N D"], likelihood: Likelihood, previous: Fitted | None, rows: RowArguments | None
    ) -> Fitted:
        """Fit a model and a guide of scaled rows.

        :param Y: rows, each with an observed entry, on the device of the fit.
        :param likelihood: likelihood of a new model.
        :param previous: fit of rows of the same shape to continue; None to start anew.
        :param rows: known quantities of the rows; None for nothing.
        """

    def fit(self, X: Any, y: Any = None, rows: RowArguments | None = None) -> Any:
        """Fit the latents of all rows, and the functions that map latents to columns.

        :param X: rows [N, D], NaN where missing.
        :param y: ignored.
        :param rows: known quantities of the rows (:class:`~pyro_lvgp.models.RowArguments`), with standard errors in the units
            of X; None for nothing.
        :raises ValueError: for columns without observed entries, fewer than two rows with observed entries, infinite entries,
            entries outside the support of the likelihood, sizes that are not positive, a device that torch does not know, or
            with ``warm_start`` rows of another shape or with other known quantities than those of the previous fit.
        :raises TypeError: for ``rows`` that are no ``RowArguments``, or that the likelihood cannot account for.
        """
        check_sizes(max_iter=self.max_iter)
        device = as_device(self.device)
        X = self._validated(X, ensure_min_samples=2)
        check_values(torch.tensor(X), rows=False, name="X")
        is_observed = ~np.isnan(X).all(1)
        if is_observed.sum() < 2:
            raise ValueError(f"expected two rows of X or more with an observed entry, got {is_observed.sum()}; add rows")
        likelihood: Any = self.likelihood
        standardised = likelihood is None
        scaler = StandardScaler(with_mean=standardised, with_std=standardised)
        Y = torch.tensor(scaler.fit_transform(X)[is_observed]).to(device)
        every = scaled_rows(rows, scaler.scale_, Y, len(X))
        known = None if every is None else every[torch.as_tensor(is_observed).to(device)]
        previous = self._previous(Y, known) if self.warm_start else None
        self.scaler_ = scaler
        self._seed = int(check_random_state(self.random_state).randint(np.iinfo(np.int32).max))
        self._local = pyro.settings.get("module_local_params")
        with own_parameters(self._local), seeded(self._seed):
            likelihood = Gaussian() if standardised else copy_with_construction(likelihood_by_name(likelihood, Y))
            self.model_, self.guide_, self.history_ = self._fit_model(Y, likelihood, previous, known)
            latents = self.guide_.median(Y)["X"]
            self.__dict__.pop("_mixture", None)  # of a previous fit
            prior = self._prior_of(every)
            self.embedding_ = prior.mean.expand(len(X), -1).numpy(force=True).copy()
        self.embedding_[is_observed] = latents.numpy(force=True)
        self.n_iter_ = len(self.history_.losses)
        return self

    def fit_transform(self, X: Any, y: Any = None, rows: RowArguments | None = None) -> Any:
        """Fit the latents of all rows, and return those of :meth:`transform`.

        :param X: rows [N, D], NaN where missing.
        :param y: ignored.
        :param rows: as for :meth:`fit`.
        """
        return self.fit(X, y, rows).transform(X, rows)

    def _previous(self, Y: Tensor, rows: RowArguments | None) -> Fitted | None:
        """Return the previous fit; None before the first one; raise if it cannot be continued on these rows."""
        if "model_" not in vars(self):
            return None
        shape = (self.model_.num_data, self.model_.data_dim)
        if tuple(Y.shape) != shape:
            raise ValueError(
                f"expected the {shape[0]} rows with observed entries and {shape[1]} columns of the previous fit, which "
                f"warm_start=True continues, got {list(Y.shape)}; set warm_start=False"
            )
        own = self.model_.rows
        parts, its = ({} if each is None else each.parts() for each in (rows, own))
        if parts.keys() != its.keys() or not all(torch.equal(value, its[name]) for name, value in parts.items()):
            raise ValueError(
                f"expected the known quantities of rows of the previous fit, {sorted(its)}, which warm_start=True continues, "
                f"got others, {sorted(parts)}; set warm_start=False"
            )
        return Fitted(self.model_, self.guide_, self.history_)

    def _prior_of(self, rows: RowArguments | None) -> Any:
        """Prior of the latents of rows: one of each, or the mixture that the training latents were fitted by."""
        if rows is None or rows.prior is None:
            return self._mixture
        return dist.Normal(*rows.prior).to_event(1)

    def _infer(self, Y: Tensor, prior: Any, rows: RowArguments | None) -> Any:
        """Posterior of the latents of rows by Laplace's approximation."""
        one = prior if rows is None or rows.prior is None else None  # rows have priors of their own
        return self.model_.infer_latents(self.guide_, Y, prior=one, rows=rows, seed=self._seed)

    @cached_property
    def _mixture(self) -> Any:
        """Mixture that the training latents were fitted by, the prior of the latents of new rows."""
        with torch.no_grad():
            return self.model_.training_prior(self.guide_, seed=self._seed)

    def transform(self, X: Any, rows: RowArguments | None = None) -> Float[np.ndarray, "N Q"]:
        """Compute the posterior means of the latents of new or training rows, by Laplace's approximation.

        A row without observed entries has the mean of the prior, which is that of the training latents.

        :param X: rows [N, D], NaN where missing.
        :param rows: known quantities of these rows, if the training rows have them, as for :meth:`fit`.
        """
        Y, is_observed = self._scaled(X)
        known = scaled_rows(rows, self.scaler_.scale_, Y, len(Y))
        with own_parameters(self._local):
            prior = self._prior_of(known)
            latents = prior.mean.expand(len(Y), -1).clone()
            for idx in chunks(is_observed):
                latents[idx] = self._infer(Y[idx], prior, None if known is None else known[idx]).mean
        return latents.numpy(force=True)

    def _scaled(self, X: Any) -> tuple[Float[Tensor, "N D"], Bool[Tensor, " N"]]:
        """Check new rows and scale them; return them, and whether each has an observed entry."""
        check_is_fitted(self)
        X = self._validated(X, reset=False)
        check_values(torch.tensor(X), rows=False, columns=False, name="X")
        Y = torch.tensor(self.scaler_.transform(X)).to(self.model_.latent_candidates())
        return Y, ~Y.isnan().all(1)

    def inverse_transform(
        self, X: Any, return_std: bool = False, rows: RowArguments | None = None
    ) -> Float[np.ndarray, "N D"] | tuple[Float[np.ndarray, "N D"], Float[np.ndarray, "N D"]]:
        """Compute predictive means at latents, and their standard deviations, noise included.

        :param X: latents [N, Q].
        :param return_std: whether to return the standard deviations too.
        :param rows: covariates, exposures and standard errors of the rows, of each or one for all, if the training rows have
            them.
        """
        check_is_fitted(self)
        latents = torch.tensor(check_array(X, dtype=CHECKS["dtype"])).to(self.model_.latent_candidates())
        with own_parameters(self._local), seeded(self._seed):
            known = scaled_rows(rows, self.scaler_.scale_, latents, len(latents))
            prediction = self.model_.predict(self.guide_, latents, rows=known)
        mean = self.scaler_.inverse_transform(prediction.mean.numpy(force=True))
        if not return_std:
            return mean
        scale = 1.0 if self.scaler_.scale_ is None else self.scaler_.scale_
        return mean, prediction.stddev.numpy(force=True) * scale

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the fitted estimator to a file, from which :meth:`load` makes it again.

        The file holds no code (:func:`~pyro_lvgp.infer.save`).  It has model, guide, likelihood, scaler and embedding, the
        history of the fit, and the parameters of the estimator.  It has no training data, but for those that a
        :class:`~pyro_lvgp.guides.RandomFeatureGuide` stores.

        :param path: name of the file; a file of that name is replaced once the new one is complete.
        :raises NotFittedError: before :meth:`fit`.
        :raises TypeError: for a likelihood that is not of this package, or a ``random_state`` that is no integer or None.
        :raises ValueError: for a copied or unpickled estimator, whose model cannot be described.
        :raises OSError: if the file cannot be written; an old file then is as it was.
        """
        check_is_fitted(self)
        with own_parameters(self._local):
            save(path, self.model_, self.guide_, extras=describe(self))

    @classmethod
    def load(cls: type[Transformer], path: str | os.PathLike[str], *, device: str | torch.device = "cpu") -> Transformer:
        """Make the fitted estimator of a file that :meth:`save` wrote; no code of the file runs.

        :param path: name of the file.
        :param device: device of model and guide.
        :raises ValueError: for a damaged file, or one of another kind.
        :raises OSError: if the file cannot be read.
        """
        with own_parameters(pyro.settings.get("module_local_params")):
            return restore(cls, load(path, device=device), path)

    @property
    def _n_features_out(self) -> int:
        return self.embedding_.shape[1]
