"""Gaussian process latent variable model of several views of the same rows."""

from collections.abc import Mapping
from copy import deepcopy
from typing import Any, NamedTuple

import pyro.distributions as dist
import torch
from jaxtyping import Float
from pyro.distributions import constraints
from pyro.nn import PyroModule, PyroParam
from torch import Tensor, nn

from pyro_lvgp._utils.argument_types import names_types
from pyro_lvgp._utils.eval_mode import eval_mode
from pyro_lvgp._utils.pyro_lock import pyro_lock
from pyro_lvgp._utils.seeding import seeded
from pyro_lvgp._utils.tables import labels_of
from pyro_lvgp._utils.validation import check_sizes
from pyro_lvgp.distributions.likelihood_predictive import LikelihoodPredictive, LikelihoodTerm
from pyro_lvgp.infer.protocols import LatentSymmetry
from pyro_lvgp.kernels import Kernel
from pyro_lvgp.kernels._symmetry import intersection, is_rotation_invariant, symmetry_of_columns
from pyro_lvgp.likelihoods import (
    Gaussian,
    Heterogeneous,
    Likelihood,
    LikelihoodName,
    RowLikelihood,
    as_likelihood,
    likelihood_by_name,
)
from pyro_lvgp.likelihoods._heterogeneous_rows import HeterogeneousRows
from pyro_lvgp.models._given_latents import as_kwargs, global_draws, rows_given
from pyro_lvgp.models._known_rows import KnownRows, default_latent_dim
from pyro_lvgp.models._latent_rows import Guide, Latents
from pyro_lvgp.models._row_model import warn_unless_scaled
from pyro_lvgp.models._sparse_columns import Shared, SparseColumns, Statistics, score_of_latents
from pyro_lvgp.models._sparse_row_model import SparseRowModel
from pyro_lvgp.models._views import check_distinct, check_known, check_names, join, matrices, slices
from pyro_lvgp.models.initialization import (
    InitialLatents,
    cluster_centres,
    column_moments,
    jointly_diagonalizing_rotation,
)
from pyro_lvgp.models.prediction import Prediction
from pyro_lvgp.models.row_arguments import RowArguments

__all__ = ["MultiViewGPLVM"]

_MAX_DEFAULT_DIM, _NUM_INDUCING = 8, 50
_NUM_STARTS = 5  # of the latents of rows whose view is predicted
_NUM_DRAWS = 4096  # of pairs of latents, for relevances


class _View(PyroModule):
    """Kernel and inducing points of a view.

    :param kernel: covariance of the functions of the view.
    :param num_inducing: number of inducing points M.
    :param input_dim: number of inputs of the functions, latents and covariates.
    """

    def __init__(self, kernel: Kernel, num_inducing: int, input_dim: int):
        super().__init__()
        self.num_inducing = num_inducing
        self.kernel: Any = kernel
        self.inducing_points: Any = PyroParam(torch.randn(num_inducing, input_dim), constraints.real)


class _ViewStatistics(NamedTuple):
    """Tensors on which log densities of rows depend besides the latents.

    :param views: tensors of each view.
    :param rows: known quantities of the rows.
    """

    views: dict[str, Statistics]
    rows: KnownRows


class MultiViewGPLVM(SparseRowModel):
    r"""Gaussian process latent variable model of several views of the same rows, which may be missing for some of the rows.

    .. math::

        x_n \sim N(0, I_Q), \qquad u^v_d \sim N(0, I_{M_v}), \qquad
        f^v_{nd} \mid u^v, x_n \sim N(c^v_d + A_{vn}^T u^v_d,\; k_v(x_n, x_n) - A_{vn}^T A_{vn}), \qquad
        y^v_{nd} \sim p_v(y \mid f^v_{nd})

    with :math:`A_{vn} = L_v^{-1} k_v(Z_v, x_n)` and :math:`k_v(Z_v, Z_v) = L_v L_v^T`.  Each view v has a kernel, inducing
    points and a likelihood of its own; all views have the same latents.  The lengthscales of a view tell which dimensions it
    depends on: dimensions are shared, or private to a view (manifold relevance determination).  A target that is a view is
    predicted for new rows from the other views.

    Data are one table [N, D] of the columns of all views, which :meth:`table` makes; a view that is missing for a row is NaN.
    ``columns`` has the slice of the table by view, ``views`` the kernel and the inducing points
    (``model.views["label"].kernel``), and :meth:`likelihood_of` returns the likelihood.  Methods of all models of rows, such
    as ``fit``, guides, ``infer_latents`` and ``impute``, take the table.

    Sites: ``u_<view>`` [D_v, M_v] in plate ``outputs_<view>``; ``X`` [N, Q] and ``y`` [N, D], observed, in plate ``data``;
    and parameters with a ``PyroSample`` prior (``model.views["label"].kernel.lengthscale = PyroSample(...)``).

    :param num_data: number of rows N.
    :param view_dims: number of columns D_v of each view, by name.
    :param latent_dim: number of latent dimensions Q.
    :param kernel: covariances of f by view; an ``RBF`` with a lengthscale √Q for each dimension for views that are left out.
    :param num_inducing: number of inducing points M_v, of all views or by view; 50 for views that are left out.
    :param likelihood: p(y | f) by view; ``Gaussian`` with a noise variance for each column for views that are left out.
        Under ``LowRankGaussian`` the entries of a row of the view are dependent given the latents.
    :param likelihood_term: as for :class:`BayesianGPLVM`, for all views.
    :param rows: what is known of each training row; None for nothing.
    :raises ValueError: if there are fewer rows than inducing points, a size is not positive, names of views are no identifiers
        or differ, a kernel has a batch shape or other columns, a likelihood is for other columns, two views share an object,
        or ``rows`` do not fit.
    :raises TypeError: for ``StudentT`` beside a likelihood whose entries of a row are dependent, or exposures or standard
        errors in ``rows`` that the likelihoods do not take.

    >>> from pyro_lvgp.guides import MeanFieldGuide
    >>> from pyro_lvgp.infer import fit
    >>> from pyro_lvgp.likelihoods import Bernoulli
    >>> x = torch.randn(60, 1)
    >>> views = {"sensors": torch.sin(x + torch.arange(4.0)), "label": (x > 0.0).float()}
    >>> model = MultiViewGPLVM.from_data(views, 2, likelihood={"label": Bernoulli()})
    >>> guide = MeanFieldGuide(model)
    >>> history = fit(model, guide, model.table(views), num_steps=20, progress=False)
    >>> new = torch.sin(torch.tensor([[-1.0], [1.0]]) + torch.arange(4.0))
    >>> model.predict_view(guide, "label", {"sensors": new}).mean.shape
    torch.Size([2, 1])

    References: Damianou, Ek, Titsias and Lawrence (2012), "Manifold relevance determination"; Titsias and Lawrence (2010),
    "Bayesian Gaussian process latent variable model".
    """

    def __init__(
        self,
        num_data: int,
        view_dims: Mapping[str, int],
        latent_dim: int,
        kernel: Mapping[str, Kernel] | None = None,
        *,
        num_inducing: int | Mapping[str, int] = _NUM_INDUCING,
        likelihood: Mapping[str, Likelihood] | None = None,
        likelihood_term: LikelihoodTerm = "svgp",
        rows: RowArguments | None = None,
    ):
        check_names(view_dims)
        counts = dict(num_inducing) if isinstance(num_inducing, Mapping) else dict.fromkeys(view_dims, num_inducing)
        counts = dict.fromkeys(view_dims, _NUM_INDUCING) | counts
        kernels, likelihoods = dict(kernel or {}), dict(likelihood or {})
        for argument, given in (("kernel", kernels), ("num_inducing", counts), ("likelihood", likelihoods)):
            check_known(given, view_dims, argument)
        check_sizes(**{f"view_dims[{name!r}]": size for name, size in view_dims.items()})
        check_sizes(**{f"num_inducing[{name!r}]": number for name, number in counts.items()})
        if num_data < max(counts.values()):
            raise ValueError(
                f"expected at least as many rows as inducing points, got num_data={num_data} and num_inducing={counts}; pass "
                f"num_inducing={num_data} or fewer"
            )
        check_distinct(kernels, "kernel")
        check_distinct(likelihoods, "likelihood")
        columns = slices(view_dims)
        joint = _joint_likelihood(columns, likelihoods)
        super().__init__(num_data, sum(view_dims.values()), latent_dim, joint, rows)
        self._set_term(likelihood_term)
        self.columns = columns
        self.views: Any = PyroModule[nn.ModuleDict]()
        self.event_dims = {"X": ("latent",), "y": ("output",)}
        for name in view_dims:
            view = _View(self._checked_kernel(kernels.get(name)), counts[name], latent_dim + self._covariate_dim)
            setattr(self.views, name, view)
            self.event_dims |= {f"u_{name}": (f"inducing_{name}",), f"views.{name}.kernel.lengthscale": ("latent",)}

    @classmethod
    @names_types
    def from_data(
        cls,
        data: Mapping[str, Any],
        latent_dim: int | None = None,
        kernel: Mapping[str, Kernel] | None = None,
        *,
        num_inducing: int | Mapping[str, int] | None = None,
        likelihood: Mapping[str, Likelihood | LikelihoodName] | None = None,
        rows: RowArguments | None = None,
        dtype: torch.dtype | None = None,
        seed: int = 0,
    ) -> "MultiViewGPLVM":
        """Create a model of the sizes of the data, and initialize it from the data.

        The default kernels and noise are for columns of about unit variance: standardise real-valued data first.  A warning
        says so if the root mean square of a view's standard deviations is below 0.1 or above 10.

        :param data: tables by view, of the same rows: tensors, arrays, data frames or lists, NaN where missing.  A vector is a
            view of one column; a row of NaN is a row without that view.
        :param latent_dim: number of latent dimensions; by default that of the priors of ``rows``, or that of Kaiser's rule for
            the columns of all views, but at most 8.
        :param kernel: covariances by view, as for the constructor.
        :param num_inducing: number of inducing points, of all views or by view; by default ten for each latent dimension, but
            from 20 to 50, at most one for each row.
        :param likelihood: likelihoods by view, as for the constructor, or their names
            (:func:`~pyro_lvgp.likelihoods.likelihood_by_name`).
        :param rows: what is known of each row; None for nothing.
        :param dtype: precision of the model; by default that of the first tensor among the data, or torch's default dtype.
        :param seed: seed of the initial values.
        :raises ValueError: for data that cannot be used, views of different rows, or sizes that do not fit.
        :raises TypeError: if the data are no mapping.
        """
        tables = matrices(data)
        check_names(tables)
        floats = [x for x in data.values() if isinstance(x, Tensor) and x.is_floating_point()]
        like = floats[0] if floats else torch.zeros((), dtype=torch.get_default_dtype())
        like = like if dtype is None else like.to(dtype)
        view_dims = {name: table.shape[-1] for name, table in tables.items()}
        num_data = len(next(iter(tables.values())))
        check_known(likelihood or {}, tables, "likelihood")
        given = {name: likelihood_by_name(each, tables[name].to(like)) for name, each in (likelihood or {}).items()}
        for name, table in tables.items():
            if name not in {**given, **(kernel or {})}:
                warn_unless_scaled(table.to(like), f" of the view {name!r}")
        make: dict[str, Any] = {"kernel": kernel, "likelihood": given, **as_kwargs(rows)}
        if latent_dim is None:
            columns = slices(view_dims)
            with torch.no_grad(), seeded(seed):
                joint = _joint_likelihood(columns, deepcopy(given)).to(like)  # not yet parts of a model
                latent_dim = default_latent_dim(joint, join(tables, columns).to(like), rows, most=_MAX_DEFAULT_DIM)
        if num_inducing is None:
            num_inducing = min(max(20, min(10 * latent_dim, 50)), num_data)
        model = cls(num_data, view_dims, latent_dim, num_inducing=num_inducing, **make).to(like)
        return model.initialize(model.table(data), seed=seed)

    def table(self, data: Mapping[str, Any]) -> Float[Tensor, "B D"]:
        """Join views to one table of the dtype and device of the model, NaN in the columns of views that are left out.

        :param data: tables by view, as for :meth:`from_data`, of one view or more.
        :raises ValueError: for views of other names, rows or columns.
        :raises TypeError: if the data are no mapping.
        """
        return join(matrices(data), self.columns).to(self.mean)

    def likelihood_of(self, view: str) -> Any:
        """Return the likelihood of a view.

        :param view: name of the view.
        :raises ValueError: for another name.
        """
        check_known([view], self.columns, "view")
        return self.likelihood.parts[list(self.columns).index(view)]

    @names_types
    @pyro_lock
    def infer_from_views(
        self, guide: Guide, given: Mapping[str, Any], *, rows: RowArguments | None = None, seed: int = 0
    ) -> torch.distributions.Distribution:
        """Infer the latents of new rows from some of their views, under the prior of the model.

        This is :meth:`infer_latents` from five starts under the prior N(0, I), if rows have no priors of their own.  The
        default prior of :meth:`infer_latents`, fitted to training latents, which depend on all views, makes intervals of the
        other views too narrow.

        :param guide: a fitted guide.
        :param given: views of the rows, as for :meth:`table`, NaN where missing.
        :param rows: what is known of the rows, if the training rows have it.
        :param seed: seed of the starts.
        :returns: a Gaussian for each row, or a mixture of Gaussians.
        :raises ValueError: for unknown views, or a row that has no given view.
        """
        candidates = self.latent_candidates()
        has_prior = "prior_loc" in (*self._row_parts, *({} if rows is None else rows.parts()))
        prior = None if has_prior else dist.Normal(torch.zeros_like(candidates[0]), 1.0).to_event(1)
        options: Any = {"rows": rows, "prior": prior, "num_starts": min(_NUM_STARTS, len(candidates)), "seed": seed}
        return self.infer_latents(guide, self.table(given), **options)

    @names_types
    @pyro_lock
    def predict_view(
        self,
        guide: Guide,
        view: str,
        given: Mapping[str, Any] | Latents,
        *,
        rows: RowArguments | None = None,
        num_samples: int = 64,
        seed: int | None = None,
    ) -> Prediction:
        r"""Predict a view of new rows from their other views, ``p(y^v | other views)``, or at latents.

        .. math:: p(y^v_* \mid y^{\text{given}}_*) = \int p(y^v_* \mid x, u)\, q(x \mid y^{\text{given}}_*)\, q(u)\, dx\, du

        The posterior of the latents is that of :meth:`infer_from_views`.  For another posterior, pass the result of
        ``infer_latents(guide, model.table(given), ...)`` as ``given``.

        :param guide: a fitted guide.
        :param view: name of the view.
        :param given: other views of the rows, as for :meth:`table`, NaN where missing; or latents of the rows, as for
            :meth:`predict`.
        :param rows: what is known of the rows, if the training rows have it.
        :param num_samples: posterior draws, the components of the mixture, each with latents of its own.
        :param seed: seed of the draws, which then do not change the global random state; None draws from the global state.
        :returns: prediction of the columns of the view.
        :raises ValueError: for unknown views, a row that has no given view, or the predicted view among the given ones.
        """
        check_known([view], self.columns, "view")
        check_sizes(num_samples=num_samples)
        if isinstance(given, Mapping):
            if view in given:
                raise ValueError(
                    f"expected data of other views than the predicted one, got {view!r} too; leave it out, or impute(...) "
                    "missing entries"
                )
            inferred = self.infer_from_views(guide, given, rows=rows, seed=0 if seed is None else seed)
            return self.predict_view(guide, view, inferred, rows=rows, num_samples=num_samples, seed=seed)
        draw_latents, num_rows = self._draws_of(given)
        known = self._checked_rows(rows, num_rows)
        index = list(self.columns).index(view)

        def of_view(row: LikelihoodPredictive) -> LikelihoodPredictive:
            parts = list(self.likelihood.by_part(row.params, row.f_mean, row.f_variance))
            likelihood, params, (f_mean, f_variance) = parts[index]
            return LikelihoodPredictive(likelihood, f_mean, f_variance, row.term, params)

        with eval_mode(self, guide), seeded(seed):
            draws = global_draws(self, guide, num_samples)
            predicted = (of_view(rows_given(self, globals_, draw_latents(), known)) for globals_ in draws)
            return self._prediction(predicted, num_samples, num_rows, labels_of(given)._replace(columns=None))

    @torch.no_grad()
    def relevance(self, view: str) -> Float[Tensor, " Q"]:
        r"""Compute the share of the variance of the functions of a view that depends on each latent dimension.

        .. math::

            r_q = \frac{E[k(x, x) - k(x, x^{(q)})]}{E[k(x, x) - k(x, x')]}, \qquad x, x' \sim p(x),

        where :math:`x^{(q)}` is x with entry q of x'.  These are the total-effect indices of Sobol under the prior of the
        functions and of the latents.  For an ``RBF`` kernel and latents N(0, I),
        :math:`r_q = (1 - s_q) / (1 - \prod_j s_j)` with :math:`s_q = (1 + 2 / \ell_q^2)^{-1/2}`.  The expectations are means
        over 4096 pairs of draws with a fixed seed, and over covariates of training rows.

        :param view: name of the view.
        :raises ValueError: for another name, or parameters of the kernel with a prior.

        Source: Sobol (2001), "Global sensitivity indices for nonlinear mathematical models and their Monte Carlo
        estimates".
        """
        check_known([view], self.columns, "view")
        kernel = self.views[view].kernel
        if any(isinstance(part, PyroModule) and part._pyro_samples for part in kernel.modules()):
            raise ValueError(
                f"expected a kernel of view {view!r} whose parameters are learned, got one with a prior; the guide has the "
                "posterior of its parameters: guide.median(Y)"
            )
        with seeded(0):
            (X, covariates), (other, _) = self._draw_inputs(), self._draw_inputs()

        def difference(Z: Tensor) -> Tensor:
            at_X, at_Z = (torch.cat([x, covariates], -1).unsqueeze(-2) for x in (X, Z))
            return (kernel.diagonal(at_X)[..., None] - kernel(at_X, at_Z)).mean()

        swapped = [torch.where(torch.arange(self.latent_dim, device=X.device) == q, other, X) for q in range(self.latent_dim)]
        return torch.stack([difference(Z) for Z in swapped]) / difference(other)

    def _draw_inputs(self) -> tuple[Float[Tensor, "draws Q"], Float[Tensor, "draws P"]]:
        """Draw latents from their prior, with the covariates of the same rows."""
        rows = torch.randint(self.num_data, (_NUM_DRAWS,), device=self.mean.device)
        known = KnownRows.of(self.rows_at(rows))
        X = known.prior_of_latents(self.latent_dim, self.mean).expand((_NUM_DRAWS,)).sample()
        return X, known.inputs(X)[:, self.latent_dim :]

    def dimensions(self, threshold: float = 0.05) -> dict[int, tuple[str, ...]]:
        """Return the views that depend on each latent dimension: several for a shared one, one for a private one, or none.

        :param threshold: smallest :meth:`relevance` of a dimension on which a view depends, between 0 and 1.
        :raises ValueError: for another threshold, and as :meth:`relevance`.
        """
        if not 0.0 < threshold < 1.0:
            raise ValueError(f"expected a threshold between 0 and 1, got {threshold}; 0.05 is a common choice")
        relevance = {name: self.relevance(name).tolist() for name in self.columns}
        return {q: tuple(name for name, each in relevance.items() if each[q] >= threshold) for q in range(self.latent_dim)}

    @property
    def _parts(self) -> dict[str, SparseColumns]:
        """Sparse Gaussian processes of each view."""
        return {
            name: SparseColumns(
                self.views[name].kernel,
                likelihood,
                self.likelihood_term,
                self.views[name].num_inducing,
                columns.stop - columns.start,
                site=f"u_{name}",
                plate=f"outputs_{name}",
            )
            for (name, columns), likelihood in zip(self.columns.items(), self.likelihood.parts, strict=True)
        }

    @property
    def _is_quadratic(self) -> bool:
        return any(part.is_quadratic for part in self._parts.values())

    def _read_shared(self) -> dict[str, Shared]:
        return {
            name: part.read(self.mean[self.columns[name]], self.views[name].inducing_points)
            for name, part in self._parts.items()
        }

    def _function(self, X: Tensor, shared: dict[str, Shared], known: KnownRows) -> LikelihoodPredictive:
        views = [part.function(X, shared[name], known.of_columns(self.columns[name])) for name, part in self._parts.items()]
        f_mean, f_variance = (
            _beside_each_other(values) for values in ([y.f_mean for y in views], [y.f_variance for y in views])
        )
        params = self.likelihood.join_params([each.likelihood for each in shared.values()])
        params = known.params_of(self.likelihood, params)
        return LikelihoodPredictive(self.likelihood, f_mean, f_variance, self.likelihood_term, params)

    def _statistics(self, y: Tensor, observed: Tensor, shared: dict[str, Shared], known: KnownRows) -> _ViewStatistics:
        views = {
            name: part.statistics(y[:, columns], observed[:, columns], shared[name], known.of_columns(columns))
            for (name, part), columns in zip(self._parts.items(), self.columns.values(), strict=True)
        }
        return _ViewStatistics(views, known)

    def _with_score(self, statistics: _ViewStatistics) -> _ViewStatistics:
        views = {name: part.with_score(statistics.views[name]) for name, part in self._parts.items()}
        return statistics._replace(views={name: _without_prior(each) for name, each in views.items()})

    def _log_likelihood(self, X: Tensor, statistics: _ViewStatistics) -> Tensor:
        views = [part.log_likelihood(X, statistics.views[name]) for name, part in self._parts.items()]
        return torch.stack(torch.broadcast_tensors(*views)).sum(0)

    def score(self, latents: Mapping[str, Tensor], statistics: _ViewStatistics) -> dict[str, Tensor]:
        """Compute gradients of the summed :meth:`log_joint`.

        Views with a Gaussian likelihood and an RBF kernel of the latents have a closed form; others are differentiated
        automatically.

        :param latents: ``{"X": [*particles, B, Q]}``.
        :param statistics: result of :meth:`statistics`.
        :returns: gradient in each of the latents.
        """
        X, views = latents["X"], statistics.views
        total = statistics.rows.prior_score(X)
        others = {name: part for name, part in self._parts.items() if views[name].score is None}
        for each in views.values():
            if each.score is not None:
                total = total + score_of_latents(each, X)
        for name, part in others.items():
            total = total + torch.func.grad(lambda X, part=part, each=views[name]: part.log_likelihood(X, each).sum())(X)
        return {"X": total}

    def _linear_latents(
        self, f: Tensor, known: KnownRows, method: InitialLatents, seed: int
    ) -> tuple[Float[Tensor, "N Q"], Float[Tensor, "N D"]]:
        """Compute latents from views of equal total variance, in a rotation in which each view depends on few of them.

        Priors of rows determine the rotation, if there are any.
        """
        variance = column_moments(f)[1].square()
        scale = torch.cat([variance[columns].sum().sqrt().expand(len(variance[columns])) for columns in self.columns.values()])
        X, filled = super()._linear_latents(f / scale, known, method, seed)
        if known.prior is None:
            loadings = X.mT @ filled / len(X)
            energies = [loadings[:, columns] @ loadings[:, columns].mT for columns in self.columns.values()]
            X = X @ jointly_diagonalizing_rotation(torch.stack(energies))
        return X, filled * scale

    def _initialize_functions(self, inputs: Tensor, function: Tensor, ridge: float, seed: int) -> None:
        for name, part in self._parts.items():
            centres = cluster_centres(inputs, part.num_inducing, seed=seed)
            Z = self._initialize_parameter("inducing_points", centres, self.views[name], f"views.{name}.")
            u = part.initial_inducing_values(Z, inputs, function[:, self.columns[name]], ridge, seed)
            self.initial_values[f"u_{name}"] = u

    def latent_symmetry(self) -> LatentSymmetry:
        """Return the orthogonal transformations of latents and inducing points under which the model is the same.

        They are those that the kernels of all views allow; see :meth:`BayesianGPLVM.latent_symmetry`.
        """
        views = dict(self.views.items())
        is_free = all(is_rotation_invariant(view, "inducing_points") for view in views.values())
        is_free = is_free and type(self).forward is SparseRowModel.forward
        if (rows := self.rows) is not None:
            is_free = is_free and rows.prior is None and rows.covariates is None
        group, scales = intersection(symmetry_of_columns(v.kernel, f"views.{name}.kernel") for name, v in views.items())
        vectors = {"X": -1, **{f"views.{name}.inducing_points": -1 for name in views}}
        return LatentSymmetry(group if is_free else "none", vectors, scales)

    def latent_candidates(self) -> Float[Tensor, "C Q"]:
        return torch.cat([view.inducing_points[..., : self.latent_dim].detach() for view in self.views.values()], -2)


def _joint_likelihood(columns: Mapping[str, slice], given: Mapping[str, Likelihood]) -> Heterogeneous:
    """Return the likelihood of the columns of all views."""
    parts = []
    for name, own in columns.items():
        group = list(range(own.start, own.stop))
        likelihood = as_likelihood(given.get(name, Gaussian(data_dim=len(group))))
        parts.append((likelihood, group))
    has_dependent_entries = any(isinstance(likelihood, RowLikelihood) for likelihood, _ in parts)
    return (HeterogeneousRows if has_dependent_entries else Heterogeneous)(parts)


def _beside_each_other(values: list[Tensor]) -> Tensor:
    """Concatenate columns whose other dimensions broadcast."""
    batch = torch.broadcast_shapes(*(value.shape[:-1] for value in values))
    return torch.cat([value.expand(*batch, value.shape[-1]) for value in values], -1)


def _without_prior(statistics: Statistics) -> Statistics:
    """Remove the prior of the latents from a score."""
    if (own := statistics.score) is None:
        return statistics
    zeros = {"intercept": torch.zeros_like(own.intercept), "slope": torch.zeros_like(own.slope)}
    return statistics._replace(score=own._replace(**zeros))
