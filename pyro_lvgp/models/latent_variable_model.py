"""Base class of latent variable models of rows: predictions, imputations and latents of new rows under any guide."""

from abc import abstractmethod
from collections.abc import Callable, Collection, Iterator
from functools import partial
from typing import Any, Literal, cast, get_args

import pyro
import pyro.distributions as dist
import torch
from jaxtyping import Float, Int
from pyro import poutine
from pyro.distributions.torch_distribution import TorchDistributionMixin
from pyro.infer.autoguide.initialization import init_to_median
from pyro.poutine import Trace
from pyro.poutine.util import prune_subsample_sites, site_is_subsample
from torch import Tensor

from pyro_lvgp._utils.abstract import AbstractModuleMeta
from pyro_lvgp._utils.argument_types import names_types
from pyro_lvgp._utils.eval_mode import eval_mode
from pyro_lvgp._utils.progress import progress_bar
from pyro_lvgp._utils.pyro_lock import pyro_lock
from pyro_lvgp._utils.seeding import seeded
from pyro_lvgp._utils.unique_names import UniquelyNamed
from pyro_lvgp._utils.validation import check_data, check_index, check_not_empty, check_sizes, check_values
from pyro_lvgp.distributions.likelihood_predictive import LikelihoodPredictive
from pyro_lvgp.distributions.normal import PrecisionNormal
from pyro_lvgp.infer.elbo.handlers import MarginalizeGaussians
from pyro_lvgp.infer.protocols import HasEncoders, HasStoredPosteriors, SamplesGlobals
from pyro_lvgp.models._laplace import Entries
from pyro_lvgp.models._new_rows import LogLikelihood, best_candidates, by_laplace, variational
from pyro_lvgp.models._own_sites import OwnSites
from pyro_lvgp.models.initialization import latent_mixture
from pyro_lvgp.models.prediction import Coords, Prediction
from pyro_lvgp.models.row_arguments import RowArguments

__all__ = ["LatentVariableModel", "check_all_given"]

Guide = Callable[..., Any]
Latents = Float[Tensor, "B Q"] | TorchDistributionMixin
Method = Literal["variational", "laplace"]
_NUM_CANDIDATES = 500
_MAX_COMPONENTS = 5
_MAX_ROWS = 2000  # whose latents a mixture is fitted to


class LatentVariableModel(UniquelyNamed, OwnSites, metaclass=AbstractModuleMeta):
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

    local_plate = "data"
    likelihood: Any

    def __init__(self, num_data: int, data_dim: int, latent_dim: int):
        super().__init__()
        self.num_data, self.data_dim, self.latent_dim = num_data, data_dim, latent_dim
        self.initial_values: dict[str, Tensor] = {}

    @abstractmethod
    def forward(self, y: Float[Tensor, "B D"] | None = None, idx: Int[Tensor, " B"] | None = None) -> Tensor:
        """Sample the sites that rows share, ``X`` and ``y``.

        :param y: observations, NaN where missing; None to generate.
        :param idx: indices of the rows in y; None for all rows.
        :returns: the value of the site y.
        """

    @abstractmethod
    def latent_candidates(self) -> Float[Tensor, "C Q"]:
        """Return the latents among which :meth:`infer_latents` chooses the initial latents of a new row."""

    def data_plate(self, y: Tensor | None = None, idx: Tensor | None = None) -> pyro.plate:
        """Create the plate over rows, for the model and its guides.

        :param y: rows, which have no effect; guides pass all arguments of the model.
        :param idx: indices of the rows; None for all rows.
        """
        return pyro.plate("data", self.num_data, subsample=idx, dim=-1)

    create_plates = data_plate

    @torch.no_grad()
    def example_data(self) -> tuple[Float[Tensor, "N D"]]:
        """Draw rows from the model, such as those that it can be fitted to."""
        with poutine.block():
            return (self().detach(),)

    def init_loc_fn(self, site: dict) -> Tensor:
        """Return the initial value of a site in a guide: that in ``initial_values``, or else the median of the prior.

        :param site: site of a trace of the model.
        """
        value = self.initial_values.get(site["name"])
        return init_to_median(site) if value is None else value.to(next(self.parameters(), value))

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
        :param X: latent positions [B, Q], or a distribution over them, such as :meth:`infer_latents` returns.
        :param rows: covariates, exposures and standard errors of the predicted rows, of each or one for all, if the training
            rows have them; priors and weights have no effect here.
        :param num_samples: posterior draws, the components of the mixture.
        :param seed: seed of the draws, which then do not change the global random state; None draws from the global state.
        :raises ValueError: if ``num_samples`` is not positive, latents have another number of dimensions or are not finite, or
            the guide lacks a latent site.
        :raises TypeError: for latents of another dtype than the model's.
        """
        check_sizes(num_samples=num_samples)
        self._check_latents(X)
        draw_latents = X.sample if isinstance(X, torch.distributions.Distribution) else lambda: X
        num_rows = X.batch_shape[0] if isinstance(X, torch.distributions.Distribution) else len(cast(Tensor, X))
        known = self._checked_rows(rows, num_rows)
        with eval_mode(self, guide), seeded(seed):
            draws = self._global_draws(guide, num_samples)
            predicted = (self._rows_given(globals_, draw_latents(), known) for globals_ in draws)
            return self._prediction(predicted, num_samples, num_rows)

    @names_types
    @pyro_lock
    def reconstruct(
        self,
        guide: Guide,
        Y: Float[Tensor, "B D"],
        idx: Int[Tensor, " B"] | None = None,
        *,
        rows: RowArguments | None = None,
        num_samples: int = 64,
        seed: int | None = None,
    ) -> Prediction:
        """Predict training rows from their own latents.

        :param guide: a fitted guide.
        :param Y: training rows.
        :param idx: their indices; None for all rows.
        :param rows: arguments in place of those that the rows have in training, such as covariates of one batch for all.
        :param num_samples: posterior draws, the components of the mixture.
        :param seed: seed of the draws, which then do not change the global random state; None draws from the global state.
        :raises ValueError: if ``num_samples`` is not positive, the rows do not fit, or the guide lacks a latent site.
        """
        check_sizes(num_samples=num_samples)
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
                    yield _rows(model.get_trace(None, idx, **_as_kwargs(known)), draw.nodes)

        with eval_mode(self, guide), seeded(seed):
            return self._prediction(predicted(), num_samples, len(Y), {"data": (("data",), idx)})

    @names_types
    @pyro_lock
    def predictive(self, guide: Guide, X: Float[Tensor, "B Q"], *, rows: RowArguments | None = None) -> LikelihoodPredictive:
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
        self._check_latents(X)
        known = self._checked_rows(rows, len(X))
        with eval_mode(self, guide):
            return self._predictor(guide, known)(X)

    @names_types
    @pyro_lock
    def infer_latents(
        self,
        guide: Guide,
        Y: Float[Tensor, "B D"],
        *,
        rows: RowArguments | None = None,
        method: Method | None = None,
        prior: torch.distributions.Distribution | None = None,
        num_starts: int = 1,
        max_components: int | None = None,
        num_steps: int | None = None,
        learning_rate: float = 0.05,
        num_samples: int | None = None,
        seed: int = 0,
    ) -> TorchDistributionMixin:
        r"""Infer the posterior of the latents of new rows, which may have missing entries, for a fixed model and guide.

        ``"laplace"`` approximates p(x) p(y | x), with the p(y | x) of :meth:`predictive`, by Gaussians with full covariances
        at modes, which Gauss-Newton steps find.  If p(x) is a mixture, there is one Gaussian for each of its components with
        the highest evidence, weighted by its evidence.  Further starts are draws from the component, for modes that the first
        steps do not reach.

        ``"variational"`` maximises :math:`E_{q(x)q(\text{globals})}[\log p(y \mid x) + \log p(x) - \log q(x)]` over a Gaussian
        q(x) with a diagonal covariance for each row, which is overconfident where latents are correlated in the posterior, as
        under little noise and few observed entries.  The optimisation starts at the candidate of the highest density.  Under
        a guide with an encoder for ``X`` it starts at the encoding, which is the result for ``num_steps=0``.  The posterior of
        a row with many missing entries may have several modes.  With several starts, q(x) is a mixture of the optimal
        Gaussians with weights proportional to ``exp`` of their bounds, in which Gaussians at the same optimum share one
        weight.

        :param guide: a fitted guide, over whose globals the objective is averaged.
        :param Y: new rows, NaN where missing.
        :param rows: what is known of the new rows.  Each row then has its own prior, if ``rows`` has priors.
        :param method: ``"laplace"``, the default, or ``"variational"``, the default under a guide with an encoder for ``X``.
        :param prior: p(x) of one row.  By default :meth:`training_prior`, if the guide stores the latents of training rows,
            and otherwise N(0, I).  Candidates are draws from a prior that is a mixture, and :meth:`latent_candidates`
            otherwise.
        :param num_starts: Gaussians for each row; with ``"laplace"`` and a mixture, for each of its components.
        :param max_components: with ``"laplace"`` and a mixture, number of components that remain for each row, those of the
            highest evidence, estimated from 8 draws of each; by default 5, and with several starts all.
        :param num_steps: number of Adam steps, 300 by default, or the largest number of Gauss-Newton steps, 10 by default.
        :param learning_rate: learning rate of Adam.
        :param num_samples: number of draws of the globals.  Each Adam step uses one of them, 8 by default.  Each Gauss-Newton
            step averages over all of them, 1 by default, with ``u`` or ``a`` marginalised.
        :param seed: seed of the noise; the global random state does not change.
        :returns: ``Normal(loc, scale).to_event(1)`` of batch shape [B], or ``MultivariateNormal`` by ``"laplace"``; or a
            ``MixtureSameFamily`` of them.
        :raises ValueError: for another method, without starts or draws, if there are fewer candidates than starts, or by
            ``"laplace"`` for a prior that is no Gaussian and no mixture of Gaussians; if ``rows`` lack what training rows
            have; or for a ``prior`` beside those of ``rows``.
        :raises TypeError: for a prior that is no distribution, or one of another dtype than the model's.
        """
        if method is None:
            method = "laplace" if self._encoder_of_latents(guide) is None else "variational"
        if method not in get_args(Method):
            raise ValueError(f"expected method in {get_args(Method)}, got {method!r}")
        # Both methods need gradients in every grad mode of the caller, and draw parameters that have a prior.
        with torch.inference_mode(False), torch.enable_grad(), seeded(seed), eval_mode(self, guide):
            self._check_rows(Y)
            check_values(Y, columns=False, name="Y")
            Y = Y.clone()  # autograd does not save tensors of inference mode
            known = self._checked_rows(rows, len(Y))
            prior = self._prior_of_rows(known, guide, seed) if prior is None else self._prior_of_row(prior, known)
            steps, samples = (10, 1) if method == "laplace" else (300, 8)
            num_steps, num_samples = steps if num_steps is None else num_steps, samples if num_samples is None else num_samples
            check_sizes(num_starts=num_starts, num_samples=num_samples)
            if max_components is None:
                max_components = _MAX_COMPONENTS if num_starts == 1 else None
            elif num_starts > 1:
                raise ValueError(
                    f"expected num_starts=1 with max_components, got {num_starts}; leave out one of the two arguments"
                )
            else:
                check_sizes(max_components=max_components)
            check_sizes(least=0, num_steps=num_steps)
            if method == "variational":
                likelihoods = list(self._log_likelihoods(guide, num_samples, known))
                loc, scale = self._initial_latents(guide, likelihoods[0], Y, prior, num_starts)
                return variational(likelihoods, Y, prior, loc, scale, num_steps=num_steps, learning_rate=learning_rate)
            start = None
            if not isinstance(prior, torch.distributions.MixtureSameFamily):
                start, _ = self._initial_latents(guide, next(self._log_likelihoods(guide, 1, known)), Y, prior, num_starts)
            entries = [self._predictor(guide, known) for _ in range(num_samples)]
            options: Any = {"num_steps": num_steps, "max_components": max_components, "by_row": known is not None}
            return by_laplace(entries, Y, prior, start, num_starts, **options)

    def training_prior(self, guide: Guide, Y: Float[Tensor, "N D"] | None = None, *, seed: int = 0) -> dist.MixtureSameFamily:
        """Fit a mixture of Gaussians to draws of the training latents, as prior of new rows' latents in :meth:`infer_latents`.

        It has a Gaussian for 25 rows, and 20 at most, fitted to three draws of each latent by
        :func:`~pyro_lvgp.models.latent_mixture`, of 2000 rows at most.  Under N(0, I), which training latents need not follow,
        rows with many missing entries have worse predictive densities.

        :param guide: a fitted guide.
        :param Y: all training rows; None for the latents that the guide stores
            (:class:`~pyro_lvgp.infer.protocols.HasStoredPosteriors`), those of the base guide of an annealed guide.
        :param seed: seed of the draws and of the EM algorithm.
        :raises ValueError: if the rows do not fit, or are not the training rows, or if they are None and the guide does not
            store latents.
        """
        if Y is not None:
            self._check_rows(Y)
            check_index(None, len(Y), self.num_data)
            self._check_are_training_rows(guide, Y, None)
        with torch.no_grad(), seeded(seed), eval_mode(self, guide):
            draws = [self._draw_training_latents(guide, Y) for _ in range(3)]
            rows = torch.randperm(len(draws[0]))[:_MAX_ROWS]
        X = torch.cat([draw[rows] for draw in draws])
        return latent_mixture(X, min(20, max(len(draws[0]) // 25, 1)), seed=seed)

    def _draw_training_latents(self, guide: Guide, Y: Tensor | None) -> Float[Tensor, "N Q"]:
        if Y is not None:
            return cast(Tensor, poutine.trace(guide).get_trace(Y).nodes["X"]["value"])
        if (posterior := self._stored_latents(guide)) is None:
            raise ValueError(
                "expected the training rows for a guide that does not store latents, such as one with an encoder, got none; "
                "pass training_prior(guide, Y)"
            )
        return posterior.sample()

    def _stored_latents(self, guide: Guide) -> torch.distributions.Distribution | None:
        return guide.stored_posterior("X") if isinstance(guide, HasStoredPosteriors) else None

    def _encoder_of_latents(self, guide: Guide) -> Any:
        return guide.encoder_of("X") if isinstance(guide, HasEncoders) else None

    def _default_prior(self, guide: Guide, seed: int) -> torch.distributions.Distribution:
        """Return a mixture fitted to the latents that the guide stores; N(0, I) if it stores none."""
        if self._stored_latents(guide) is not None:
            return self.training_prior(guide, seed=seed)
        return dist.Normal(torch.zeros_like(self.latent_candidates()[0]), 1.0).to_event(1)

    @names_types
    @pyro_lock
    def impute(
        self,
        guide: Guide,
        Y: Float[Tensor, "B D"],
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
        :param Y: rows, NaN where missing.
        :param idx: indices of the rows among the training rows; None for all training rows.
        :param latents: latents of new rows, from :meth:`infer_latents`; ``idx`` then has no effect.
        :param rows: as for :meth:`predict` with latents, and else as for :meth:`reconstruct`.
        :param num_samples: posterior draws, the components of the mixture.
        :param seed: seed of the draws, which then do not change the global random state; None draws from the global state.
        :raises ValueError: if ``num_samples`` is not positive, rows and latents do not fit, or the guide lacks a latent site.
        """
        if latents is None:
            filled = self.reconstruct(guide, Y, idx, rows=rows, num_samples=num_samples, seed=seed)
        else:
            self._check_rows(Y)
            self._check_latents(latents, num_rows=len(Y))
            filled = self.predict(guide, latents, rows=rows, num_samples=num_samples, seed=seed)
        return filled.with_observed(Y)

    def _prediction(
        self, rows: Iterator[LikelihoodPredictive], num_samples: int, num_rows: int, coords: Coords | None = None
    ) -> Prediction:
        """Mixture of the entries' distributions over draws, of which only moments are stored if the mixture is too large."""
        return Prediction(
            (_entries(row) for row in rows),
            hold_parts=num_samples * num_rows * self.data_dim <= Prediction.max_size,
            fill_value=self.likelihood.fill_value,
            dims=("data", "output"),
            coords=coords,
        )

    def _checked_rows(self, rows: RowArguments | None, num_rows: int) -> RowArguments | None:
        """Arguments of rows that are not training rows; None if training rows have none.

        :raises ValueError: if they are of another number of rows, or others than those of training rows.
        """
        if rows is not None:
            raise TypeError(f"expected no rows for a {type(self).__name__}, which has no arguments by row, got {rows}")
        return None

    def _replaced_rows(self, idx: Tensor, rows: RowArguments) -> RowArguments | None:
        """Arguments of training rows, of which some are replaced."""
        return self._checked_rows(rows, len(idx))

    def _prior_of_rows(self, rows: RowArguments | None, guide: Guide, seed: int) -> torch.distributions.Distribution:
        """Return the priors of the latents of rows that have one each, or else the default prior of one row."""
        if rows is None or rows.prior is None:
            return self._prior_of_row(self._default_prior(guide, seed), rows)
        return dist.Normal(*rows.prior).to_event(1)

    def _prior_of_row(self, prior: Any, rows: RowArguments | None) -> torch.distributions.Distribution:
        """Raise unless the prior is a distribution over the latents of one row, and the only prior."""
        if rows is not None and rows.prior is not None:
            raise ValueError(f"expected one prior of the latents, got {prior} and those of rows; leave out one of the two")
        like = self.latent_candidates()
        if not isinstance(prior, torch.distributions.Distribution):
            raise TypeError(
                f"expected a distribution over a row's latents as prior, got {prior!r}; pass one, such as latent_mixture(...)"
            )
        if prior.batch_shape + prior.event_shape != (self.latent_dim,) or not prior.event_shape:
            raise ValueError(
                f"expected a prior of one row's {self.latent_dim} latents, got batch shape {list(prior.batch_shape)} and "
                f"event shape {list(prior.event_shape)}; a Normal needs .to_event(1)"
            )
        with seeded(0):
            dtype = prior.sample().dtype
        if dtype != like.dtype:
            raise TypeError(
                f"expected a prior of the model's dtype {like.dtype}, got {dtype}; create the prior from tensors of that dtype"
            )
        return prior

    def _check_rows(self, Y: Tensor) -> None:
        """Raise unless Y has the model's number of columns, dtype and device, and is in the support of its likelihood."""
        check_data(Y, self.data_dim, like=self.latent_candidates(), name="Y")
        self._check_entries(Y, name="Y")

    def _check_are_training_rows(self, guide: Guide, Y: Tensor, idx: Tensor | None) -> None:
        """Raise if most rows differ in most entries from the training rows of their latents, as far as these are known.

        Under a guide with an encoder the latents are those of the given rows, whichever they are.
        """
        known = self.__dict__.get("_training_rows")
        if known is None or self._encoder_of_latents(guide) is not None:
            return
        rows = known if idx is None else known[idx]
        both = ~(torch.isnan(Y) | torch.isnan(rows))
        differs = 2 * (both & torch.ne(Y, rows)).sum(-1) > both.sum(-1)
        if 2 * int(differs.sum()) > len(Y):
            raise ValueError(
                f"expected training rows, got {len(Y)} rows of which {int(differs.sum())} differ in most entries from "
                "the training rows of these indices, whose latents they would get; infer the latents of new rows first: "
                "impute(guide, Y, latents=model.infer_latents(guide, Y))"
            )

    def __getstate__(self):
        # Copies do not contain the data.
        return {name: value for name, value in super().__getstate__().items() if name != "_training_rows"}

    def _check_entries(self, y: Tensor, name: str = "y") -> None:
        """Raise if an entry is infinite, or outside the support."""
        check_values(y, rows=False, columns=False, name=name)
        self.likelihood.check(y)

    def _check_latents(self, X: Latents, num_rows: int | None = None) -> None:
        """Raise unless X are finite latents of rows or a distribution over these, of ``num_rows`` rows if given."""
        if isinstance(X, torch.distributions.Distribution):
            shape = [*X.batch_shape, *X.event_shape]
        else:
            latents = cast(Tensor, X)
            check_data(latents, self.latent_dim, like=self.latent_candidates(), name="X")
            if not latents.isfinite().all():
                raise ValueError("expected finite latents, got NaN or infinity; call infer_latents(...) for new rows")
            shape = [*latents.shape]
        if len(shape) != 2 or shape[1] != self.latent_dim or num_rows not in (None, shape[0]):
            rows = "rows" if num_rows is None else num_rows
            raise ValueError(
                f"expected latents [{rows}, {self.latent_dim}], one for each row, got {shape}; use .expand([rows]) on "
                "the distribution of the latents of one row"
            )

    def _global_draws(self, guide: Guide, num_samples: int) -> Iterator[dict[str, Tensor]]:
        """Sample the sites that rows share."""
        for _ in progress_bar(range(num_samples), "posterior draws"):
            yield {
                name: cast(Tensor, site["value"])
                for name, site in prune_subsample_sites(self._trace_without_data(guide)).iter_stochastic_nodes()
                if all(frame.name != "data" for frame in site["cond_indep_stack"])
            }

    def _trace_without_data(self, guide: Guide) -> Trace:
        """Trace of the guide without data: of the sites that rows share, and of one unobserved row if the guide needs it."""
        like = self.latent_candidates()
        row = torch.full((1, self.data_dim), torch.nan, dtype=like.dtype, device=like.device)
        with torch.no_grad():
            draw: Guide = guide
            if isinstance(guide, SamplesGlobals):
                draw = partial(guide.sample_globals, local_plate=self.local_plate)
            return poutine.trace(draw).get_trace(row, torch.zeros(1, dtype=torch.long, device=like.device))

    def _predictor(self, guide: Guide, known: RowArguments | None) -> Entries:
        """Function :meth:`predictive` of X, and of the indices of its rows, for one draw of the sites that rows share."""
        drawn = self._trace_without_data(guide)
        for name in ("X", "data"):  # keep the sites that rows share
            drawn.nodes.pop(name, None)
        for site in drawn.nodes.values():
            fn: Any = site.get("fn")
            if isinstance(fn, PrecisionNormal):  # which bounds do not marginalise
                site["fn"] = fn.multivariate_normal

        def entries(X: Tensor, index: Tensor | None = None) -> LikelihoodPredictive:
            rows = known if known is None or index is None else known[index]
            model = poutine.replay(MarginalizeGaussians(drawn)(poutine.condition(self, {"X": X})), drawn)
            with torch.set_grad_enabled(X.requires_grad):
                trace = poutine.trace(model).get_trace(None, torch.arange(len(X), device=X.device), **_as_kwargs(rows))
            y = _rows(trace, {"X", *drawn.nodes})
            return LikelihoodPredictive(y.likelihood, y.f_mean, y.f_variance, "fitc", y.params)

        return entries

    def _rows_given(self, globals_: dict[str, Tensor], X: Tensor, rows: RowArguments | None) -> LikelihoodPredictive:
        """Distribution p(y | X, globals) of one row for each latent; raise if there are no latents."""
        check_not_empty(X, "X")
        idx = torch.arange(X.shape[-2], device=X.device)
        with torch.set_grad_enabled(X.requires_grad):
            model = poutine.condition(self, {**globals_, "X": X})
            return _rows(poutine.trace(model).get_trace(None, idx, **_as_kwargs(rows)), {"X", *globals_})

    def _log_likelihood_rows(
        self, globals_: dict[str, Tensor], known: RowArguments | None, X: Tensor, Y: Tensor
    ) -> Float[Tensor, " B"]:
        """Compute log p(y_n | x_n, globals) of the observed entries of each row, of one start after the other."""
        if known is not None and known.num_rows is not None:
            known = known[torch.arange(len(X), device=X.device) % known.num_rows]
        rows = self._rows_given(globals_, X, known).rows(~torch.isnan(Y))
        return rows.log_prob(torch.nan_to_num(Y, self.likelihood.fill_value))

    def _log_likelihoods(self, guide: Guide, num_samples: int, known: RowArguments | None) -> Iterator[LogLikelihood]:
        """Functions log p(y | x) of rows, one for each draw of the sites that rows share."""
        return (partial(self._log_likelihood_rows, globals_, known) for globals_ in self._global_draws(guide, num_samples))

    def _initial_latents(
        self, guide: Guide, log_likelihood: LogLikelihood, Y: Tensor, prior: torch.distributions.Distribution, num_starts: int
    ) -> tuple[Tensor, Tensor]:
        """Initial means and standard deviations of latents: the encodings of the rows, or the best candidates."""
        encoder = self._encoder_of_latents(guide)
        if encoder is not None and num_starts == 1:
            with torch.no_grad():
                loc, scale = encoder(Y)
            # A full covariance is replaced by its diagonal.
            return loc, scale if scale.shape == loc.shape else scale.square().sum(-1).sqrt()
        is_mixture = isinstance(prior, torch.distributions.MixtureSameFamily)
        candidates = prior.sample((_NUM_CANDIDATES,)) if is_mixture else self.latent_candidates()
        if prior.batch_shape:  # each row has a prior of its own, which may be far from all candidates
            candidates = torch.cat([prior.mean[None], candidates[:, None].expand(-1, len(Y), -1)])
        loc = best_candidates(log_likelihood, Y, prior, candidates, num_starts)
        return loc, torch.full_like(loc, 0.1)


def _as_kwargs(rows: RowArguments | None) -> dict[str, RowArguments]:
    """Keyword arguments of ``forward``, which need not take the arguments of rows if there are none."""
    return {} if rows is None else {"rows": rows}


def _rows(trace: Trace, given: Collection[str]) -> LikelihoodPredictive:
    """Distribution of the observations; raise if the trace has latents that were not given, or another distribution."""
    check_all_given(trace, given)
    fn: Any = trace.nodes["y"]["fn"]
    y = fn.base_dist if isinstance(fn, dist.Independent) else fn
    if not isinstance(y, LikelihoodPredictive) or fn.event_dim != 1:
        raise TypeError(
            f"expected an Independent around a LikelihoodPredictive at the site 'y' of a model without data, got {fn}; "
            "sample y from LikelihoodPredictive(likelihood, f_mean, f_variance).rows()"
        )
    return y


def _entries(y: LikelihoodPredictive) -> LikelihoodPredictive:
    """Distribution of the entries [1, N, D] for one draw, with the log predictive density as ``log_prob``."""
    params = None if y.params is None else y.params.detach()
    entries = LikelihoodPredictive(y.likelihood, y.f_mean.detach(), y.f_variance.detach(), "fitc", params)
    return entries.expand(torch.Size((1, *entries.batch_shape)))


def check_all_given(trace: Trace, given: Collection[str]) -> None:
    """Raise if a model sampled latents from their priors, because a guide has no such sites.

    :param trace: trace of the model.
    :param given: names of the sites whose values the guide gave.
    :raises ValueError: if a latent site of the trace is not among them.
    """
    latents = {name for name, site in trace.iter_stochastic_nodes() if not site_is_subsample(site)} - {"y"}
    if unknown := sorted(latents - set(given)):
        raise ValueError(
            f"expected a guide of all latent sites of the model, got one without {unknown}; create the guide after all priors "
            "of the model are set, and fit it; make known quantities frozen parameters, instead of conditioning their sites"
        )
