"""Simulation-based calibration of a guide by ranks of true values among posterior draws."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyro
import torch
import xarray
from jaxtyping import Float, Int
from tqdm import tqdm

from pyro_lvgp._utils.argument_types import names_types
from pyro_lvgp._utils.pyro_lock import pyro_lock
from pyro_lvgp._utils.seeding import seeded
from pyro_lvgp._utils.validation import check_sizes
from pyro_lvgp.diagnostics._fixed_model import MakeGuide, fit_guide, fixed_copy, simulate
from pyro_lvgp.infer import sample_traces

__all__ = ["RankCalibration", "SiteRanks", "simulation_based_calibration"]

_MAX_POINTS = 20  # at which distribution functions are compared
_NUM_REPLICATES = 10_000
_CHUNK_SIZE = 500  # of replicates, which bounds the memory


@dataclass(frozen=True, eq=False)
class SiteRanks:
    """Ranks of the true values of a site among posterior draws, and their test of uniformity.

    The empirical distribution function is over simulations and entries of the site.

    :param ranks: number of draws below the truth, from 0 to the number of draws.
    :param dims: names of the dimensions of an entry.
    :param points: probabilities at which the distribution functions are compared.
    :param ecdf: empirical distribution function of the ranks.
    :param lower: lower end of a simultaneous 95 % band of the function for an exact posterior.
    :param upper: upper end.
    :param p_value: probability of a greater deviation for an exact posterior.
    """

    ranks: Int[np.ndarray, "simulations *shape"]
    dims: tuple[str, ...]
    points: Float[np.ndarray, " points"]
    ecdf: Float[np.ndarray, " points"]
    lower: Float[np.ndarray, " points"]
    upper: Float[np.ndarray, " points"]
    p_value: float


@dataclass(frozen=True, eq=False)
class RankCalibration(Mapping[str, SiteRanks]):
    """Ranks by site, made by :func:`simulation_based_calibration`; ``str`` lists the tests.

    :param sites: ranks by the name of the site.
    :param num_draws: number of posterior draws in each simulation.
    """

    sites: Mapping[str, SiteRanks]
    num_draws: int

    def __getitem__(self, site: str) -> SiteRanks:
        return self.sites[site]

    def __iter__(self) -> Any:
        return iter(self.sites)

    def __len__(self) -> int:
        return len(self.sites)

    @property
    def p_values(self) -> dict[str, float]:
        """P-values of the test of uniformity by site."""
        return {name: site.p_value for name, site in self.sites.items()}

    def to_xarray(self) -> xarray.Dataset:
        """Return the ranks by site, with the dimension ``simulation``, and p-values as attributes of the variables."""
        variables = {
            name: (("simulation", *site.dims), site.ranks, {"p_value": site.p_value}) for name, site in self.sites.items()
        }
        return xarray.Dataset(variables, attrs={"num_draws": self.num_draws})

    def __str__(self) -> str:
        lines = [f"  {name}: p = {p_value:.2g}, {_shape_of(self[name])}" for name, p_value in self.p_values.items()]
        return "\n".join(["uniformity of the ranks of true values among posterior draws", *lines])


def _shape_of(site: SiteRanks) -> str:
    """Describe the largest kind of deviation from uniform ranks that is outside the band."""
    low, high = site.ecdf < site.lower, site.ecdf > site.upper
    early = site.points < 0.5
    kinds = {
        "posterior too narrow": (high & early).any() and (low & ~early).any(),
        "posterior too wide": (low & early).any() and (high & ~early).any(),
        "posterior too low": low.any() and not high.any(),
        "posterior too high": high.any() and not low.any(),
    }
    return next((kind for kind, holds in kinds.items() if holds), "not uniform" if (low | high).any() else "within the band")


@names_types
@pyro_lock
def simulation_based_calibration(
    model: Callable[..., Any],
    make_guide: MakeGuide,
    num_simulations: int = 100,
    *inputs: Any,
    data_site: str = "y",
    sites: Sequence[str] | None = None,
    num_draws: int = 99,
    vectorize: bool = True,
    seed: int = 0,
    progress: bool = True,
) -> RankCalibration:
    r"""Test a guide on data simulated from the model: are the ranks of true values among posterior draws uniform.

    .. math::

        \theta_s \sim p(\theta), \quad y_s \sim p(y \mid \theta_s), \quad
        \theta_{s1}, \dots, \theta_{sL} \sim q(\theta \mid y_s), \quad
        r_s = \#\{l : \theta_{sl} < \theta_s\}

    If q is the posterior, the ranks are uniform on 0 … L, for each entry of each site.  Ranks at both ends mean that q is too
    narrow, ranks in the middle that it is too wide, and ranks at one end that it is biased.

    **Test.**  The entries of a site have ranks that are dependent within a simulation.  The test uses that the truth and
    the L draws of a simulation are exchangeable if q is the posterior: each of :math:`10^4` replicates takes another of these
    L + 1 values of the whole site as the truth, at random, in each simulation.  The statistic is
    :math:`\max_z |\hat F(z) - z| / \sigma(z)` at 19 points z, with :math:`\hat F` the empirical distribution function of the
    ranks of all entries, and :math:`\sigma(z)` the standard deviation of that of the replicates.  Its p-value is exact up to
    Monte Carlo error, and at least :math:`10^{-4}`.  The band is simultaneous over z.

    **Limits.**  The test is on average over data from the prior, not about your data.  Parameters without a prior are not
    tested: the model has its present values.  For latents that the likelihood does not identify, such as those of a GPLVM,
    which can be rotated, the guide is at one of many modes, and the test rejects it; test sites that are identified.

    :param model: a Pyro model, called with ``(*inputs, None)`` to simulate, and with ``(*inputs, y)`` for data.
    :param make_guide: function ``make_guide(model, *inputs, y)`` that returns a new guide, fitted to data.  It gets a copy of
        the model whose parameters are fixed.
    :param num_simulations: number S of simulations and fits.
    :param inputs: arguments of the model before the data.
    :param data_site: name of the site of the data.
    :param sites: names of the sites to test; all latent sites by default.
    :param num_draws: number L of posterior draws of each fit.
    :param vectorize: False draws one by one, for models that do not broadcast over dimensions left of their plates.
    :param seed: seed of the simulations; the global random state does not change.
    :param progress: show a progress bar.
    :raises ValueError: for fewer than 2 simulations or draws, unknown sites, a function with parameters, a ``make_guide`` that
        changes those of the model, or draws that are NaN.

    >>> import pyro.distributions as dist
    >>> def model(y):
    ...     loc = pyro.sample("loc", dist.Normal(0.0, 1.0))
    ...     with pyro.plate("data", 3):
    ...         return pyro.sample("y", dist.Normal(loc, 1.0), obs=y)
    >>> def exact(model, y):
    ...     return lambda y: pyro.sample("loc", dist.Normal(y.sum() / 4.0, 0.5))
    >>> def narrow(model, y):
    ...     return lambda y: pyro.sample("loc", dist.Normal(y.sum() / 4.0, 0.25))
    >>> for make_guide in (exact, narrow):
    ...     print(simulation_based_calibration(model, make_guide, 100, progress=False))
    uniformity of the ranks of true values among posterior draws
      loc: p = 0.61, within the band
    uniformity of the ranks of true values among posterior draws
      loc: p = 0.0001, posterior too narrow

    Source: Talts, Betancourt, Simpson, Vehtari and Gelman (2018), "Validating Bayesian inference algorithms with
    simulation-based calibration"; Säilynoja, Bürkner and Vehtari (2022), "Graphical test for discrete uniformity and its
    applications in goodness-of-fit evaluation and multiple sample comparison", for simultaneous bands.
    """
    check_sizes(least=2, num_simulations=num_simulations, num_draws=num_draws)
    ranks: dict[str, list[np.ndarray]] = {}
    dims: dict[str, tuple[str, ...]] = {}
    rng = np.random.default_rng(seed)
    for simulation in tqdm(range(num_simulations), disable=not progress, unit="fit"):
        fixed = fixed_copy(model)
        with pyro.get_param_store().scope(), seeded(seed + simulation):
            truth: dict[str, Any] = {name: site["value"] for name, site in simulate(fixed, inputs).iter_stochastic_nodes()}
            args = (*inputs, _pop_data(truth, data_site, sites))
            guide = fit_guide(make_guide, fixed, args)
            options: Any = {"predict": False, "log_likelihood": False, "vectorize": vectorize}
            draws = sample_traces(fixed, guide, *args, num_samples=num_draws, **options).sites
        for name in truth if sites is None else sites:
            values = torch.cat([truth[name].reshape(draws[name].value.shape[1:])[None], draws[name].value])
            ranks.setdefault(name, []).append(_ranks(values.double().numpy(force=True), name, rng))
            dims[name] = _dims(name, draws[name])
    return RankCalibration({name: _test(np.stack(each), dims[name], rng) for name, each in ranks.items()}, num_draws)


def _pop_data(truth: dict[str, Any], data_site: str, sites: Sequence[str] | None) -> Any:
    """Remove the data from the simulated values; raise unless there are these sites."""
    unknown = {data_site, *(sites or ())} - set(truth)
    if unknown or data_site in (sites or ()):
        raise ValueError(
            f"expected a data_site and latent sites of the model, got {sorted(unknown) or data_site} of {sorted(truth)}; the "
            "model draws the data when it is called with None in place of them"
        )
    return truth.pop(data_site)


def _dims(name: str, site: Any) -> tuple[str, ...]:
    """Names of the dimensions of a site: those of its plates, and others by number."""
    plates = [plate or f"{name}_batch_{i}" for i, plate in enumerate(site.plates)]
    return (*plates, *(f"{name}_dim_{i}" for i in range(site.event_dim)))


def _ranks(values: np.ndarray, name: str, rng: np.random.Generator) -> np.ndarray:
    """Rank of each of the truth and the draws among the others, entry by entry; ties are broken at random.

    :param values: values [1 + L, *shape].
    """
    if np.isnan(values).any():
        raise ValueError(f"expected draws of site {name!r} that are numbers, got NaN; did the fit of the guide diverge?")
    shuffled = rng.permutation(len(values))
    ranks = values[shuffled].argsort(0, kind="stable").argsort(0)
    return ranks[shuffled.argsort()]


def _test(ranks: Int[np.ndarray, "S L *shape"], dims: tuple[str, ...], rng: np.random.Generator) -> SiteRanks:
    """Compare the ranks of the truths, the first in each simulation, with those of values chosen at random."""
    num_simulations, num_values = ranks.shape[:2]
    thresholds = np.unique(np.linspace(0, num_values, min(_MAX_POINTS, num_values) + 1).round().astype(int))[1:-1]
    entries = ranks.reshape(num_simulations, num_values, -1)
    below = np.stack([(entries < threshold).mean(2) for threshold in thresholds], -1)  # [S, 1 + L, points]
    rows, replicates = np.arange(num_simulations), []
    for start in range(0, _NUM_REPLICATES, _CHUNK_SIZE):
        chosen = rng.integers(num_values, size=(min(_CHUNK_SIZE, _NUM_REPLICATES - start), num_simulations))
        replicates.append(below[rows, chosen].mean(1))
    replicated, ecdf, points = np.concatenate(replicates), below[:, 0].mean(0), thresholds / num_values
    scale = replicated.std(0)
    deviations = np.abs((replicated - points) / scale).max(1)
    deviation = np.abs((ecdf - points) / scale).max()
    p_value = (1 + (deviations >= deviation).sum()) / (1 + _NUM_REPLICATES)
    half_width = np.quantile(deviations, 0.95) * scale
    lower, upper = np.clip(points - half_width, 0.0, 1.0), np.clip(points + half_width, 0.0, 1.0)
    return SiteRanks(ranks[:, 0], dims, points, ecdf, lower, upper, float(p_value))
