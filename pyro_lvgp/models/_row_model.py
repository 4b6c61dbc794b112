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
    """:class:`LatentVariableModel` with a likelihood p(y | f) and constant offsets c_d of the functions.

    The class checks data, and computes initial values by a linear model of the data.

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
        self.likelihood.bound_noise(Y)
        self._training_rows = Y.detach()

    def _observed(self, y: Tensor, idx: Tensor | None) -> Tensor:
        """Mask of the observed entries of a batch; raise if the batch cannot be used."""
        check_data(y, self.data_dim, like=self.mean)
        if is_validation_enabled():
            check_index(idx, len(y), self.num_data)
            self._check_entries(y)
        return ~torch.isnan(y)

    def _initialize_linear(
        self, Y: Tensor, method: InitialLatents, latents: Tensor | None, seed: int
    ) -> tuple[Tensor, Tensor]:
        """Initial latents, and the values of f in a linear model of the data, less their column means.

        The column means become ``mean``, and the likelihood is initialised from the linear model.  The latents are those of
        the linear model if none are given.
        """
        self.check(Y)
        given = None if latents is None else self._standardise(latents)
        with seeded(seed):  # the same draw of a parameter with a prior as below
            f = self.likelihood.initial_function(Y)
        X, filled = linear_latents(f, self.latent_dim, method=method, seed=seed)
        centre = f.nanmean(0)
        self.likelihood.init_from_data(Y, centre + X @ torch.linalg.lstsq(X, filled - centre).solution)
        with seeded(seed):
            self.mean = self.likelihood.initial_function(Y).nanmean(0)
        return X if given is None else given, filled - centre

    def _initialize_parameter(self, name: str, value: Tensor) -> Tensor:
        """Set the initial value of a parameter, unless the parameter is frozen, or of the site of a parameter with a prior.

        :returns: the initial value, that of the frozen parameter included.
        """
        if name in self._pyro_samples:
            self.initial_values[name] = value
            return value
        if getattr(self, f"{name}_unconstrained").requires_grad:
            setattr(self, name, value)
        return getattr(self, name)

    def _standardise(self, latents: Tensor) -> Tensor:
        """Scale given latents to the mean and variance of their prior."""
        check_tensors([latents])
        X = latents.to(self.mean)
        if X.shape != (self.num_data, self.latent_dim):
            raise ValueError(
                f"expected latents [{self.num_data}, {self.latent_dim}], a row for each datum, got {list(X.shape)}"
            )
        X = (X - X.mean(0)) / X.std(0, correction=0)
        if not torch.isfinite(X).all():
            raise ValueError(
                "expected finite latents with columns that vary, got NaN, infinite or constant ones; drop these columns"
            )
        return X
