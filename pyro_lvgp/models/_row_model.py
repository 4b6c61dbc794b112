"""Models of rows of observations that scatter around functions of latents."""

import torch
from jaxtyping import Float
from pyro.infer.util import is_validation_enabled
from torch import Tensor

from pyro_lvgp._utils.seeding import seeded
from pyro_lvgp._utils.validation import check_data, check_index, check_sizes, check_tensors, check_values
from pyro_lvgp.likelihoods import Likelihood, as_likelihood
from pyro_lvgp.models.initialization import InitialLatents, linear_latents
from pyro_lvgp.models.latent_variable_model import LatentVariableModel


class RowModel(LatentVariableModel):
    """A :class:`LatentVariableModel` with a likelihood p(y | f) and constants c_d that the functions vary about.

    You get besides: checks of the data, and a linear model of them to start from.

    :param likelihood: p(y | f); ``Gaussian()`` if None.
    :param sizes: further sizes to check.
    :raises ValueError: if a size is not positive, or the likelihood has parameters or counts of another number of outputs.
    """

    def __init__(self, num_data: int, data_dim: int, latent_dim: int, likelihood: Likelihood | None, **sizes: int):
        check_sizes(num_data=num_data, data_dim=data_dim, latent_dim=latent_dim, **sizes)
        super().__init__(num_data, data_dim, latent_dim)
        self.likelihood = as_likelihood(likelihood)
        self.likelihood.check_outputs(data_dim, self.likelihood.params())
        self.register_buffer("mean", torch.zeros(data_dim))

    def check(self, Y: Float[Tensor, "N D"]) -> None:
        """Raise if the training data cannot be used: shape, dtype, device, support, a row or column all missing."""
        check_data(Y, self.data_dim, like=self.mean)
        check_index(None, len(Y), self.num_data)
        self._check_entries(Y)
        check_values(Y)

    def _observed(self, y: Tensor, idx: Tensor | None) -> Tensor:
        """Which entries are observed, after a look at the batch."""
        check_data(y, self.data_dim, like=self.mean)
        if is_validation_enabled():
            check_index(idx, len(y), self.num_data)
            self._check_entries(y)
        return ~torch.isnan(y)

    def _start(self, Y: Tensor, method: InitialLatents, latents: Tensor | None, seed: int) -> tuple[Tensor, Tensor]:
        """Latents to start from, and f in a linear model of the data less its column means, which become ``mean``.

        The likelihood starts at that linear model.  Latents are its own if none are given.
        """
        self.check(Y)
        own = None if latents is None else self._standardised(latents)
        with seeded(seed):  # of a parameter with a prior, which is read twice
            f = self.likelihood.initial_function(Y)
        X, filled = linear_latents(f, self.latent_dim, method=method, seed=seed)
        centre = f.nanmean(0)
        self.likelihood.init_from_data(Y, centre + X @ torch.linalg.lstsq(X, filled - centre).solution)
        with seeded(seed):
            self.mean = self.likelihood.initial_function(Y).nanmean(0)
        return X if own is None else own, filled - centre

    def _start_parameter(self, name: str, value: Tensor) -> Tensor:
        """Let a parameter start at a value, unless it is frozen; where it has a prior, guides start there instead.

        :returns: where it starts.
        """
        if name in self._pyro_samples:
            self.initial_values[name] = value
            return value
        if getattr(self, f"{name}_unconstrained").requires_grad:
            setattr(self, name, value)
        return getattr(self, name)

    def _standardised(self, latents: Tensor) -> Tensor:
        """Latents found elsewhere, with the mean and variance of their prior."""
        check_tensors([latents])
        X = latents.to(self.mean)
        if X.shape != (self.num_data, self.latent_dim):
            raise ValueError(
                f"expected latents [{self.num_data}, {self.latent_dim}], a row for each datum, got {list(X.shape)}"
            )
        X = (X - X.mean(0)) / X.std(0, correction=0)
        if not torch.isfinite(X).all():
            raise ValueError("expected finite latents with columns that vary, got NaN, infinite or constant ones")
        return X
