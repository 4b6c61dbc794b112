"""Inference of the latents of new rows, and their priors."""

from functools import partial
from typing import Any, Literal, cast, get_args

import pyro.distributions as dist
import torch
from jaxtyping import Float
from pyro import poutine
from pyro.distributions.torch_distribution import TorchDistributionMixin
from torch import Tensor

from pyro_lvgp._utils.argument_types import names_types
from pyro_lvgp._utils.eval_mode import eval_mode
from pyro_lvgp._utils.pyro_lock import pyro_lock
from pyro_lvgp._utils.seeding import seeded
from pyro_lvgp._utils.tables import Table
from pyro_lvgp._utils.validation import check_index, check_sizes, check_values
from pyro_lvgp.infer.protocols import HasStoredPosteriors
from pyro_lvgp.models._given_latents import global_draws, predictor, rows_given
from pyro_lvgp.models._latent_rows import Guide, LatentRows, encoder_of_latents
from pyro_lvgp.models._new_rows import best_candidates, by_laplace, variational
from pyro_lvgp.models.initialization import latent_mixture
from pyro_lvgp.models.row_arguments import RowArguments

Method = Literal["variational", "laplace"]
_NUM_CANDIDATES = 500
_MAX_COMPONENTS = 5
_MAX_ROWS = 2000  # whose latents a mixture is fitted to


class LatentInference(LatentRows):
    """Models of rows that infer the posterior of the latents of new rows."""

    @names_types
    @pyro_lock
    def infer_latents(
        self,
        guide: Guide,
        Y: Table,
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
        :param Y: new rows, NaN where missing: a tensor or a table (:func:`~pyro_lvgp.tables.as_tensor`).
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
            method = "laplace" if encoder_of_latents(guide) is None else "variational"
        if method not in get_args(Method):
            raise ValueError(f"expected method in {get_args(Method)}, got {method!r}")
        # Both methods need gradients in every grad mode of the caller, and draw parameters that have a prior.
        with torch.inference_mode(False), torch.enable_grad(), seeded(seed), eval_mode(self, guide):
            (Y,) = self.as_data(Y)
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
                draws = list(global_draws(self, guide, num_samples))
                loc, scale = self._initial_latents(guide, draws[0], known, Y, prior, num_starts)
                likelihoods = [partial(self._log_likelihood_rows, globals_, known) for globals_ in draws]
                return variational(likelihoods, Y, prior, loc, scale, num_steps=num_steps, learning_rate=learning_rate)
            start = None
            if not isinstance(prior, torch.distributions.MixtureSameFamily):
                start, _ = self._initial_latents(guide, next(global_draws(self, guide, 1)), known, Y, prior, num_starts)
            entries = [predictor(self, guide, known) for _ in range(num_samples)]
            options: Any = {"num_steps": num_steps, "max_components": max_components, "by_row": known is not None}
            return by_laplace(entries, Y, prior, start, num_starts, **options)

    def training_prior(self, guide: Guide, Y: Table | None = None, *, seed: int = 0) -> dist.MixtureSameFamily:
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
            (Y,) = self.as_data(Y)
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

    def _default_prior(self, guide: Guide, seed: int) -> torch.distributions.Distribution:
        """Return a mixture fitted to the latents that the guide stores; N(0, I) if it stores none."""
        if self._stored_latents(guide) is not None:
            return self.training_prior(guide, seed=seed)
        return dist.Normal(torch.zeros_like(self.latent_candidates()[0]), 1.0).to_event(1)

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

    def _log_likelihood_rows(
        self, globals_: dict[str, Tensor], known: RowArguments | None, X: Tensor, Y: Tensor
    ) -> Float[Tensor, " B"]:
        """Compute log p(y_n | x_n, globals) of the observed entries of each row, of one start after the other."""
        if known is not None and known.num_rows is not None:
            known = known[torch.arange(len(X), device=X.device) % known.num_rows]
        rows = rows_given(self, globals_, X, known).rows(~torch.isnan(Y))
        return rows.log_prob(torch.nan_to_num(Y, self.likelihood.fill_value))

    def _initial_latents(
        self,
        guide: Guide,
        globals_: dict[str, Tensor],
        known: RowArguments | None,
        Y: Tensor,
        prior: torch.distributions.Distribution,
        num_starts: int,
    ) -> tuple[Tensor, Tensor]:
        """Initial means and standard deviations of latents: the encodings of the rows, or the best candidates."""
        encoder = encoder_of_latents(guide)
        if encoder is not None and num_starts == 1:
            with torch.no_grad():
                loc, scale = encoder(Y)
            # A full covariance is replaced by its diagonal.
            return loc, scale if scale.shape == loc.shape else scale.square().sum(-1).sqrt()
        is_mixture = isinstance(prior, torch.distributions.MixtureSameFamily)
        candidates = prior.sample((_NUM_CANDIDATES,)) if is_mixture else self.latent_candidates()
        if prior.batch_shape:  # each row has a prior of its own, which may be far from all candidates
            candidates = torch.cat([prior.mean[None], candidates[:, None].expand(-1, len(Y), -1)])
        entries = partial(rows_given, self, globals_, rows=known)
        by_row = known is not None and known.num_rows is not None
        loc = best_candidates(entries, Y, prior, candidates, num_starts, by_row=by_row)
        return loc, torch.full_like(loc, 0.1)
