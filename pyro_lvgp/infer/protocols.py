"""Protocols of optional capabilities of models and guides.

A model or guide is any callable with Pyro sites.  Capabilities beyond that are recognised by ``isinstance`` from attributes
and methods of its class; no base class is needed.

>>> class Model:
...     local_plate = "data"
...
...     def __call__(self, y): ...
>>> isinstance(Model(), HasLocalPlate), isinstance(Model(), HasPlates)
(True, False)
"""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol, runtime_checkable

from jaxtyping import Float
from torch import Tensor, nn
from torch.distributions import Distribution

from pyro_lvgp.distributions.diagonal_mixture import DiagonalMixture
from pyro_lvgp.kernels._symmetry import SymmetryGroup
from pyro_lvgp.likelihoods import Likelihood

__all__ = [
    "ChecksData",
    "HasArgumentShapes",
    "HasConditionalSite",
    "HasEncoders",
    "HasEventDims",
    "HasExampleArguments",
    "HasExampleData",
    "HasInducingPoints",
    "HasInitialValues",
    "HasInputs",
    "HasLatentSymmetry",
    "HasLikelihoodTerm",
    "HasLocalPlate",
    "HasLogJoint",
    "HasPlates",
    "HasPointLikelihood",
    "HasProcessSite",
    "HasScoreTensors",
    "HasStoredPosteriors",
    "LatentSymmetry",
    "RandomFeatureModel",
    "SamplesGlobals",
    "SubsamplesPoints",
    "TakesMiniBatches",
    "TakesTables",
]


@runtime_checkable
class HasLocalPlate(Protocol):
    """Model or guide with a plate over data.

    ``local_plate`` is the name of the plate, or None if all sites are treated jointly.
    """

    local_plate: str | None


@runtime_checkable
class HasPlates(Protocol):
    """Model that creates its plates for guides, so that both have the same subsamples."""

    def create_plates(self, *args: Any, **kwargs: Any) -> Any:
        """Create the plates of a call, as for ``create_plates`` of Pyro's autoguides.

        :param args: arguments of the model.
        :returns: a ``pyro.plate`` or several.
        """


@runtime_checkable
class HasInitialValues(Protocol):
    """Model with initial values of its latent sites."""

    def init_loc_fn(self, site: dict) -> Tensor:
        """Return the initial value of a latent site, as for ``init_loc_fn`` of Pyro's autoguides.

        :param site: site of a trace of the model.
        """


@runtime_checkable
class HasEventDims(Protocol):
    """Model with names of event dimensions for ArviZ.

    ``event_dims`` has the names by site, such as ``{"X": ("latent",)}``.
    """

    event_dims: Mapping[str, Sequence[str]]


@runtime_checkable
class HasInputs(Protocol):
    """Model with arguments that are inputs, not data, which ArviZ's group ``constant_data`` contains.

    ``input_dims`` has names of dimensions by argument, such as ``{"x": ("series", "points", "input")}``, of which arguments of
    fewer dimensions have the last ones.
    """

    input_dims: Mapping[str, Sequence[str]]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Sample all sites."""


class LatentSymmetry(NamedTuple):
    """Transformations under which the joint density of a model is the same, if its learned parameters are transformed too.

    :param group: ``"rotations"``, all orthogonal matrices; ``"signed permutations"``; ``"signs"``; or ``"none"``.
    :param vectors: sites whose components the matrix transforms, with the axis of the components from the right; the first one
        has the latents.
    :param scales: sites with a positive number for each component, which permutations permute, with the axis.
    :param further: symmetries of other latents, which have transformations of their own.

    >>> LatentSymmetry("signed permutations", {"X": -1}, {"kernel.lengthscale": -1}).group
    'signed permutations'
    """

    group: SymmetryGroup
    vectors: Mapping[str, int]
    scales: Mapping[str, int] = {}
    further: tuple["LatentSymmetry", ...] = ()


@runtime_checkable
class HasLatentSymmetry(Protocol):
    """Model whose latents are determined up to a group of transformations alone.

    :func:`~pyro_lvgp.diagnostics.chains_to_arviz` aligns the latents of several fits by them.
    """

    def latent_symmetry(self) -> LatentSymmetry:
        """Return the transformations under which the model, with all values of its learned parameters, is the same."""


@runtime_checkable
class HasExampleData(Protocol):
    """Model that generates data of the shapes of its training data."""

    def example_data(self) -> tuple:
        """Return arguments for a call of the model that needs no data of the user."""


@runtime_checkable
class HasExampleArguments(Protocol):
    """Model of series that makes arguments of given shapes, by which a guide can be called without data of the user."""

    def example_arguments(self, shapes: Sequence[Sequence[int] | None]) -> tuple:
        """Return arguments for a call of the model, with values that it accepts.

        :param shapes: shapes of the arguments; None for one that is no tensor.
        """


@runtime_checkable
class HasArgumentShapes(Protocol):
    """Guide that remembers the shapes of the arguments of its first call.

    ``argument_shapes`` has the shapes, and None for arguments that are no tensors; it is None before the first call.
    """

    argument_shapes: tuple[tuple[int, ...] | None, ...] | None


@runtime_checkable
class ChecksData(Protocol):
    """Model that checks its training data."""

    def check(self, *args: Any) -> None:
        """Raise if the data cannot be used.

        :param args: arguments of the model.
        """


@runtime_checkable
class TakesTables(Protocol):
    """Model that converts tables of data, such as data frames, to tensors."""

    def as_data(self, *args: Any) -> tuple[Tensor, ...]:
        """Return the arguments of the model as tensors of its dtype and device.

        :param args: arguments of the model, tensors or tables.
        """


@runtime_checkable
class TakesMiniBatches(Protocol):
    """Model that selects its own mini-batches."""

    def mini_batch(self, idx: Tensor, *args: Any) -> tuple:
        """Return the arguments of the model for a mini-batch.

        :param idx: indices of the mini-batch.
        :param args: arguments of the model for all data.
        """


@runtime_checkable
class HasLogJoint(Protocol):
    """Model whose log joint over the sites of its local plate is a pure function of tensors.

    :class:`~pyro_lvgp.guides.AutoAnnealedLangevin` computes the scores of its chains by :meth:`score`, without tracing the
    model.

    ``local_plate`` is the name of the plate over data, ``local_sites`` has the names of the latent sites in it, which are on
    the real line, and ``log_joint_forward`` is the ``forward`` whose log joint :meth:`log_joint` computes.  A subclass that
    overrides ``forward`` only is traced, unless it sets ``log_joint_forward = forward`` to declare that the log joint is that
    of its own ``forward``.
    """

    local_plate: str
    local_sites: frozenset[str]
    log_joint_forward: ClassVar[Callable[..., Any]]

    def statistics(self, *args: Any, **kwargs: Any) -> Any:
        """Compute everything that the log joint needs besides the local sites, from sites sampled as by ``forward``.

        :param args: arguments of the model.
        :returns: tensors, in any structure.
        """

    def log_joint(self, latents: Mapping[str, Tensor], statistics: Any) -> Tensor:
        """Compute the log density of each datum and its latents.

        :param latents: values of the local sites.
        :param statistics: result of :meth:`statistics`.
        """

    def score(self, latents: Mapping[str, Tensor], statistics: Any) -> dict[str, Tensor]:
        """Compute the gradients of the summed log joint with respect to the latents.

        :param latents: values of the local sites.
        :param statistics: result of :meth:`statistics`.
        """


@runtime_checkable
class HasScoreTensors(Protocol):
    """:class:`HasLogJoint` with one local site, whose score may be a tuple of tensors with derivatives of its own.

    Chains of :class:`~pyro_lvgp.guides.AutoAnnealedLangevin` then need no autograd of the score.  A subclass that overrides
    ``score`` overrides :meth:`score_tensors` too.
    """

    def score_tensors(self, statistics: Any) -> Any:
        """Return the score as an object like :class:`~pyro_lvgp.ops.rbf_score.RBFScore`; None where there is none.

        :param statistics: result of ``statistics``.
        """


@runtime_checkable
class HasProcessSite(Protocol):
    """Model with one Gaussian-process site.

    ``gp_site`` is the name of the site.  The first argument of the model are the inputs.
    """

    gp_site: str


@runtime_checkable
class HasPointLikelihood(Protocol):
    """Model of points whose data are independent given the latents of each point.

    A guide that improves the posteriors of a series evaluates :meth:`log_prob_of_points` at draws of the latents.
    """

    def log_prob_of_points(self, latents: Mapping[str, Tensor], *args: Any) -> Float[Tensor, "draws *series N"]:
        """Compute the log likelihood of the observed entries of each point.

        :param latents: values of all latent sites.  Draws of a site are along a new first dimension left of all plates, with
            dimensions of size 1 between it and the plates of the site.
        :param args: arguments of the model.
        """


@runtime_checkable
class HasConditionalSite(HasProcessSite, Protocol):
    """Model with inducing values at the site ``gp_site``.

    ``conditional_site`` is the name of the site of function values given the inducing values.
    """

    conditional_site: str


@runtime_checkable
class HasInducingPoints(Protocol):
    """Model whose parameter ``inducing_points`` can be replaced.

    >>> import torch
    >>> from pyro.nn import PyroModule, PyroParam
    >>> from pyro_lvgp.networks import replace_parameter
    >>> class Model(PyroModule):
    ...     def __init__(self, inducing_points):
    ...         super().__init__()
    ...         self.inducing_points = PyroParam(inducing_points)
    ...
    ...     def place_inducing_points(self, inducing_points):
    ...         replace_parameter(self, "inducing_points", inducing_points)
    >>> isinstance(Model(torch.zeros(3, 1)), HasInducingPoints)
    True
    """

    def place_inducing_points(self, inducing_points: Tensor) -> None:
        """Replace the parameter ``inducing_points``; the new one requires gradients if the old one did.

        :param inducing_points: new inducing points, in any number.
        """


@runtime_checkable
class SubsamplesPoints(Protocol):
    """Model that takes mini-batches of the points of one series, without a subsampled plate."""

    def shows_some_points(self, *args: Any, **kwargs: Any) -> bool:
        """Return whether these arguments are a mini-batch of the points of one series.

        :param args: arguments of the model.
        """


@runtime_checkable
class HasLikelihoodTerm(Protocol):
    """Model with a choice of likelihood terms.

    ``likelihood_term`` is the name of the term.  Only the density of ``"fitc"`` is that of the model's draws.
    """

    likelihood_term: str


@runtime_checkable
class RandomFeatureModel(Protocol):
    """Model of a ``RandomFeatureGuide``, with latents, and frequencies and weights of random features.

    See :class:`~pyro_lvgp.models.RandomFeatureLVM` for the sites, and for shapes of the attributes.
    """

    num_data: int
    data_dim: int
    latent_dim: int
    num_frequencies: int
    num_components: int
    initial_values: dict[str, Tensor]

    if TYPE_CHECKING:  # parameters, buffers and submodules are no static attributes, which isinstance needs on Python 3.12
        mean: Tensor
        concentration: Tensor
        component_locs: Any
        component_scales: Any
        likelihood: Likelihood

    def __call__(self, *args: Any, **kwargs: Any) -> Any: ...

    @property
    def is_conjugate(self) -> bool:
        """Whether the weights have a Gaussian posterior in closed form given latents and frequencies."""

    def data_plate(self, y: Tensor | None = None, idx: Tensor | None = None) -> Any:
        """Create the plate over rows."""

    def rows_at(self, idx: Tensor | None = None) -> Any:
        """Return known quantities of training rows, or of all; None for nothing."""

    def offsets(self, rows: Any = None) -> Tensor:
        """Return the constants of the functions of rows."""

    def likelihood_params(self, rows: Any = None) -> Tensor | None:
        """Read the parameter of the likelihood of rows."""

    def features(
        self, X: Float[Tensor, "*#batch N Q"], omega: Float[Tensor, "*#batch F Q"], rows: Any = None
    ) -> Float[Tensor, "*batch N L"]:
        """Compute the features of latents."""

    def spectral_points(self, logits: Float[Tensor, "*#batch C"]) -> DiagonalMixture:
        """Return the distribution of the frequencies given the weights of the components."""

    def weight_sites(
        self,
        y: Float[Tensor, "B D"],
        f_mean: Float[Tensor, "*#batch D"],
        f_variance: Float[Tensor, "*#batch #D"],
        rows: Any = None,
    ) -> tuple[Float[Tensor, "*#batch D"], Float[Tensor, "*#batch #D"]]:
        """Compute quadratic sites that approximate or bound the likelihood."""


@runtime_checkable
class SamplesGlobals(Protocol):
    """Guide that can sample only the sites outside a plate over data."""

    def sample_globals(self, *args: Any, local_plate: str) -> Mapping[str, Tensor]:
        """Sample the sites that are outside a plate.

        :param args: arguments of the model.
        :param local_plate: name of the plate.
        """


@runtime_checkable
class HasEncoders(Protocol):
    """Guide that amortises sites by encoders."""

    def encoder_of(self, site: str) -> nn.Module | None:
        """Return the encoder of a site, from data to loc and scale; None if the site has parameters of its own.

        :param site: name of the site.
        """


@runtime_checkable
class HasStoredPosteriors(Protocol):
    """Guide with parameters for the latents of each training row."""

    def stored_posterior(self, site: str) -> Distribution | None:
        """Return the posterior of a site for all training rows, without data; None if it depends on data.

        :param site: name of the site.
        """
