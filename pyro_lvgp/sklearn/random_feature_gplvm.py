"""Random-feature latent variable model as a scikit-learn transformer."""

from typing import Any, Literal

import torch
from jaxtyping import Float
from numpy.random import RandomState
from torch import Tensor

from pyro_lvgp._utils.validation import check_sizes
from pyro_lvgp.guides import RandomFeatureGuide
from pyro_lvgp.guides.random_feature.guide import Weights
from pyro_lvgp.infer import fit
from pyro_lvgp.likelihoods import Gaussian, Likelihood, LikelihoodName
from pyro_lvgp.models import RandomFeatureLVM, RowArguments
from pyro_lvgp.models.initialization import MAX_TSNE_DIM, MIN_TSNE_ROWS, linear_latents, tsne_layout
from pyro_lvgp.sklearn._latent_transformer import Fitted, LatentTransformer

__all__ = ["RandomFeatureGPLVM"]

Init = Literal["auto", "pca", "tsne"]
_INITS = ("auto", "pca", "tsne")


class RandomFeatureGPLVM(LatentTransformer):
    r"""Random-feature latent variable model as a transformer, which learns a stationary kernel together with the latents.

    The estimator fits a :class:`~pyro_lvgp.models.RandomFeatureLVM` with a :class:`~pyro_lvgp.guides.RandomFeatureGuide`:

    .. math::

        x_n \sim N(0, I_Q), \qquad f_{nd} = c_d + \sigma_k\, \varphi(x_n)^T a_d, \qquad y_{nd} \sim p(y \mid f_{nd}).

    The defaults are those of the package's benchmarks of two-dimensional embeddings: 100 frequencies, an initial lengthscale
    of 0.5, Gaussian frequencies, and initial latents by t-SNE.  All rows are used in each step.

    NaN marks a missing entry, in training data and in new rows.  Rows without observed entries are left out of the fit, and
    have the mean of the prior as latents.  With the default likelihood each column is standardised; with other likelihoods
    data are not scaled.  The fit has the floating-point precision of the data.

    :param n_components: number Q of latent dimensions.
    :param likelihood: likelihood p(y | f) of :mod:`pyro_lvgp.likelihoods`, or its name
        (:func:`~pyro_lvgp.likelihoods.likelihood_by_name`); a Gaussian by default.
    :param n_frequencies: number F of frequencies, half the number of features.
    :param lengthscale: initial lengthscale of the kernel; by default that of the model.
    :param init: initial latents: ``"pca"``, ``"tsne"`` of data whose missing entries are filled by a linear model, or
        ``"auto"``, which is t-SNE for up to three dimensions and five rows or more, and else PCA.  With priors, covariates or
        exposures of rows it is PCA of what these do not explain.
    :param layout: ``"tsne"`` for the initial latents and the initial lengthscale of
        :meth:`RandomFeatureLVM.from_data(..., layout="tsne") <pyro_lvgp.models.RandomFeatureLVM.from_data>`, which chooses the
        lengthscale by the log density of the data at the layout; None for those of ``init`` and ``lengthscale``.
    :param freeze_latents: whether the latents stay at their initial values; their standard deviations are learned.
    :param max_iter: number of sweeps through the blocks of parameters.
    :param warm_start: whether a further call of ``fit`` continues from the previous one, for the same rows in the same order.
    :param device: device of the fit, such as ``"cuda"``; None for torch's default device.
    :param random_state: seed of initial values and draws.
    :param verbose: whether to show a progress bar.

    A fitted estimator has the attributes of :class:`GPLVM`: ``embedding_``, ``model_``, ``guide_``, ``history_``, ``scaler_``,
    ``n_iter_``, ``n_features_in_`` and ``feature_names_in_``.  The guide holds the training rows, which the posterior of the
    weights depends on.

    Source: Li et al., "Scalable random feature latent variable models"; Gundersen, Zhang and Engelhardt (2021), "Latent
    variable modeling with random features"; van der Maaten and Hinton (2008), "Visualizing data using t-SNE".

    >>> from sklearn.datasets import load_iris
    >>> RandomFeatureGPLVM(max_iter=5, n_frequencies=10, random_state=0).fit_transform(load_iris().data).shape
    (150, 2)
    """

    model_: RandomFeatureLVM
    guide_: RandomFeatureGuide

    def __init__(
        self,
        n_components: int = 2,
        *,
        likelihood: Likelihood | LikelihoodName | None = None,
        n_frequencies: int = 100,
        lengthscale: float | None = None,
        init: Init = "auto",
        layout: Literal["tsne"] | None = None,
        freeze_latents: bool = False,
        max_iter: int = 500,
        warm_start: bool = False,
        device: str | torch.device | None = None,
        random_state: int | RandomState | None = None,
        verbose: bool | int = False,
    ):
        self.n_components = n_components
        self.likelihood = likelihood
        self.n_frequencies = n_frequencies
        self.lengthscale = lengthscale
        self.init = init
        self.layout = layout
        self.freeze_latents = freeze_latents
        self.max_iter = max_iter
        self.warm_start = warm_start
        self.device = device
        self.random_state = random_state
        self.verbose = verbose

    def _fit_model(
        self, Y: Float[Tensor, "N D"], likelihood: Likelihood, previous: Fitted | None, rows: RowArguments | None
    ) -> Fitted:
        check_sizes(n_components=self.n_components, n_frequencies=self.n_frequencies)
        if previous is None:
            model, guide = self._make(Y, likelihood, rows)
        elif previous.model.latent_dim != self.n_components:
            raise ValueError(
                f"expected the n_components={previous.model.latent_dim} of the previous fit, which warm_start=True continues, "
                f"got {self.n_components}; set warm_start=False"
            )
        else:
            model, guide, _ = previous
        options: Any = {"num_steps": self.max_iter, "seed": self._seed, "progress": bool(self.verbose)}
        return Fitted(model, guide, fit(model, guide, Y, optim=guide.blocks(), **options))

    def _make(
        self, Y: Float[Tensor, "N D"], likelihood: Likelihood, rows: RowArguments | None
    ) -> tuple[RandomFeatureLVM, RandomFeatureGuide]:
        """Make a model and a guide with initial values."""
        options: Any = {"num_frequencies": self.n_frequencies, "lengthscale": self.lengthscale, "likelihood": likelihood}
        options |= {"rows": rows, "seed": self._seed}
        if self.layout is None:
            model: Any = RandomFeatureLVM(len(Y), Y.shape[1], self.n_components, **options)
            model = model.to(Y).initialize(Y, latents=self._initial_latents(Y, likelihood, rows), seed=self._seed)
        elif self.layout != "tsne" or self.init != "auto":
            raise ValueError(
                f'expected layout="tsne" with init="auto", or layout=None, got layout={self.layout!r} and init={self.init!r}'
            )
        else:
            model = RandomFeatureLVM.from_data(Y, self.n_components, layout=self.layout, **options)
        # One Cholesky factor for all columns, instead of one for each column with gaps.
        weights: Weights | None = "filled" if Y.isnan().any() and type(likelihood) is Gaussian else None
        options = {"frequencies": "gaussian", "weights": weights, "freeze_latents": self.freeze_latents, "seed": self._seed}
        return model, RandomFeatureGuide(model, **options)

    def _initial_latents(
        self, Y: Float[Tensor, "N D"], likelihood: Likelihood, rows: RowArguments | None
    ) -> Float[Tensor, "N Q"] | None:
        """Compute initial latents by t-SNE; None for those of the model, by PCA."""
        if self.init not in _INITS:
            raise ValueError(f"expected init in {_INITS}, got {self.init!r}")
        if rows is not None and not (rows.prior is None and rows.covariates is None and rows.exposure is None):
            if self.init == "tsne":
                raise ValueError(
                    f'expected init="pca" or "auto" with priors, covariates or exposures of rows, which t-SNE ignores, got '
                    f"{self.init!r}"
                )
            return None
        if self.init == "pca" or (self.init == "auto" and (self.n_components > MAX_TSNE_DIM or len(Y) < MIN_TSNE_ROWS)):
            return None
        if self.n_components > MAX_TSNE_DIM:
            raise ValueError(f'expected init="pca" or "auto" for more than 3 latent dimensions, got {self.init!r}')
        with torch.no_grad():
            function = likelihood.to(Y).initial_function(Y)
        _, filled = linear_latents(function, self.n_components, seed=self._seed)
        return tsne_layout(filled, self.n_components, seed=self._seed)
