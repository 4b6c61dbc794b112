# ---
# jupyter:
#   jupytext:
#     text_representation:
#       format_name: percent
# ---
"""A Dirichlet process mixture in closed form: `python -m tutorials.dirichlet_mixture [--steps N] [--out FOLDER]`."""

# %% [markdown]
# # Groups of wines
#
# 178 wines of three cultivars, 13 chemical measurements of each, reduced to the first two principal components.  A
# mixture of Gaussians with a Dirichlet process prior finds groups without a given number of them.  Model and guide are plain
# Pyro.  Every factor of the guide has a closed form given the others, so that `BlockCoordinateVI` needs no gradient and no
# draw.  scikit-learn has the same algorithm, which serves as a reference.

# %%
import argparse
import time
import warnings
from pathlib import Path
from typing import NamedTuple

import matplotlib
import numpy as np
import pyro
import pyro.distributions as dist
import torch
from matplotlib import pyplot as plt
from pyro.nn import PyroModule, PyroParam
from sklearn.cluster import KMeans
from sklearn.datasets import load_wine
from sklearn.decomposition import PCA
from sklearn.exceptions import ConvergenceWarning
from sklearn.metrics import adjusted_rand_score
from sklearn.mixture import BayesianGaussianMixture
from sklearn.preprocessing import StandardScaler
from torch import Tensor
from torch.distributions import Beta, Gamma, constraints, kl_divergence
from torch.nn.functional import one_hot, pad

from pyro_lvgp import conjugate
from pyro_lvgp.conjugate import NormalInverseWishart
from pyro_lvgp.infer import Block, BlockCoordinateVI

NUM_COMPONENTS, NUM_STARTS, TOLERANCE = 10, 10, 1e-6
CONCENTRATION = (1.0, 1.0)  # shape and rate of the prior


# %% [markdown]
# ## The model
#
# Sticks $v_c \sim \mathrm{Beta}(1, \alpha)$ break the unit interval into weights $\pi_c = v_c \prod_{j<c} (1 - v_j)$; the last
# component takes the remainder.  Means and covariances are normal-inverse-Wishart.


# %%
def measurements() -> Tensor:
    """Principal components of standardised measurements [wine, 2], standardised again."""
    x = PCA(2).fit_transform(StandardScaler().fit_transform(load_wine().data))
    return torch.as_tensor(StandardScaler().fit_transform(x))


def prior(x: Tensor) -> NormalInverseWishart:
    """Normal-inverse-Wishart prior of the mean and covariance of each component, scikit-learn's default."""
    Q = x.shape[-1]
    return NormalInverseWishart.of(x.new_zeros(Q), x.new_tensor(1.0), torch.eye(Q).to(x), x.new_tensor(float(Q)))


class Wishart(dist.Wishart):
    """Wishart distribution without the warning of torch's own, which reports singular draws that are not singular."""

    def rsample(self, sample_shape=()):
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Singular sample detected")
            return super().rsample(sample_shape)


def model(x: Tensor) -> None:
    """Truncated Dirichlet process mixture."""
    components = prior(x)
    alpha = pyro.sample("alpha", dist.Gamma(*x.new_tensor(CONCENTRATION)))
    with pyro.plate("sticks", NUM_COMPONENTS - 1):
        v = pyro.sample("v", dist.Beta(torch.ones_like(alpha), alpha))
    with pyro.plate("components", NUM_COMPONENTS):
        precision = pyro.sample("precision", Wishart(components.dof, precision_matrix=components.scale))
        mean = pyro.sample("mean", dist.MultivariateNormal(components.mean, precision_matrix=components.kappa * precision))
    log_weights = pad(v.log(), (0, 1)) + pad((-v).log1p().cumsum(-1), (1, 0))
    with pyro.plate("wines", len(x)):
        z = pyro.sample("z", dist.Categorical(logits=log_weights))
        pyro.sample("x", dist.MultivariateNormal(mean[z], precision_matrix=precision[z]), obs=x)


# %% [markdown]
# ## The guide
#
# A factor for each site, in natural parameters: `components` holds both means and precisions.


# %%
class Guide(PyroModule):
    """q(α) q(v) q(μ, Σ) q(z).

    :param x: the data.
    :param labels: initial component of each wine.
    """

    def __init__(self, x: Tensor, labels: Tensor):
        super().__init__()
        self.alpha, self.v, self.components, self.z = PyroModule(), PyroModule(), PyroModule(), PyroModule()
        self.z.log_probs = PyroParam(one_hot(labels, NUM_COMPONENTS).to(x).log())
        shape, rate = x.new_tensor(CONCENTRATION)
        self.alpha.shape = PyroParam(shape, constraints.positive)
        self.alpha.rate = PyroParam(rate, constraints.positive)
        self.v.a = PyroParam(x.new_ones(NUM_COMPONENTS - 1), constraints.positive)
        self.v.b = PyroParam(x.new_ones(NUM_COMPONENTS - 1), constraints.positive)
        for name, value in prior(x)._asdict().items():
            setattr(self.components, name, PyroParam(value.expand(NUM_COMPONENTS, *value.shape).clone()))

    def factor(self) -> NormalInverseWishart:
        """Factor of means and covariances."""
        return NormalInverseWishart(*(getattr(self.components, name) for name in NormalInverseWishart._fields))

    def weights(self) -> Tensor:
        """Expected weights [component]."""
        v = self.v.a / (self.v.a + self.v.b)
        return pad(v, (0, 1), value=1.0) * pad((1.0 - v).cumprod(-1), (1, 0), value=1.0)

    def forward(self, x: Tensor) -> None:
        """Draw all sites."""
        components = self.factor()
        pyro.sample("alpha", dist.Gamma(self.alpha.shape, self.alpha.rate))
        with pyro.plate("sticks", NUM_COMPONENTS - 1):
            pyro.sample("v", dist.Beta(self.v.a, self.v.b))
        with pyro.plate("components", NUM_COMPONENTS):
            precision = pyro.sample("precision", Wishart(components.dof, precision_matrix=components.scale))
            given = components.kappa[:, None, None] * precision
            pyro.sample("mean", dist.MultivariateNormal(components.mean, precision_matrix=given))
        with pyro.plate("wines", len(x)):
            pyro.sample("z", dist.Categorical(logits=self.z.log_probs))


# %% [markdown]
# ## Closed forms
#
# An update takes the arguments of model and guide and returns new parameter values by name.  `pyro_lvgp.conjugate` has the
# formulas.


# %%
def make_blocks(guide: Guide) -> list[Block]:
    """Blocks of the factors, in scikit-learn's order: assignments last."""

    def alpha(x: Tensor) -> dict[str, Tensor]:
        shape, rate = conjugate.concentration(*x.new_tensor(CONCENTRATION), guide.v.a, guide.v.b)
        return {"guide.alpha.shape": shape, "guide.alpha.rate": rate}

    def v(x: Tensor) -> dict[str, Tensor]:
        a, b = conjugate.stick_breaking(guide.z.log_probs.exp(), guide.alpha.shape / guide.alpha.rate)
        return {"guide.v.a": a, "guide.v.b": b}

    def components(x: Tensor) -> dict[str, Tensor]:
        new = conjugate.normal_inverse_wishart(prior(x), guide.z.log_probs.exp(), x)
        return {f"guide.components.{name}": value for name, value in new._asdict().items()}

    def z(x: Tensor) -> dict[str, Tensor]:
        log_likelihood = conjugate.normal_log_likelihood(guide.factor(), x)
        log_weights = conjugate.stick_log_weights(guide.v.a, guide.v.b)
        return {"guide.z.log_probs": conjugate.categorical_assignments(log_weights, log_likelihood)}

    return [Block(update.__name__, sites=[update.__name__], update=update) for update in (v, alpha, components, z)]


# %% [markdown]
# ## The bound
#
# With all factors conjugate the bound is a sum of known expectations.  As for `SVI`, a function of model, guide and data may
# serve as the loss.


# %%
def negative_bound(model: object, guide: Guide, x: Tensor) -> Tensor:
    """Exact negative evidence lower bound."""
    components, v, log_phi = guide.factor(), Beta(guide.v.a, guide.v.b), guide.z.log_probs
    phi, alpha = log_phi.exp(), Gamma(guide.alpha.shape, guide.alpha.rate)
    log_likelihood = conjugate.normal_log_likelihood(components, x)
    assigned = (phi * (conjugate.stick_log_weights(guide.v.a, guide.v.b) + log_likelihood)).sum()
    # E log Beta(v; 1, α) = E log α + (E α − 1) E log(1 − v)
    log_alpha = alpha.concentration.digamma() - alpha.rate.log()
    log_left = guide.v.b.digamma() - (guide.v.a + guide.v.b).digamma()
    sticks = (log_alpha + (alpha.mean - 1.0) * log_left + v.entropy()).sum()
    kl = kl_divergence(alpha, Gamma(*x.new_tensor(CONCENTRATION)))
    kl = kl + conjugate.normal_inverse_wishart_kl(components, prior(x)).sum()
    return kl - assigned - torch.special.entr(phi).sum() - sticks


# %% [markdown]
# ## Fits
#
# Coordinate ascent ends in a local optimum.  We start ten times, from groups by k-means, and keep the fit with the best bound.
# scikit-learn starts from the same groups.  It fixes the concentration at 1.  One of our two fits does the same: the factor of
# α stays at the prior, whose mean is 1, since parameters that require no gradient need no block.


# %%
class Fit(NamedTuple):
    """Fit from one set of initial groups."""

    guide: Guide
    bounds: list[float]  # after each sweep
    seconds: float

    @property
    def groups(self) -> Tensor:
        """Most probable component of each wine."""
        return self.guide.z.log_probs.argmax(-1)


def kmeans(x: Tensor, seed: int) -> Tensor:
    """Initial groups, those of scikit-learn's mixture for this seed."""
    fitted = KMeans(NUM_COMPONENTS, n_init=1, random_state=np.random.RandomState(seed)).fit(x.numpy())
    return torch.as_tensor(fitted.labels_, dtype=torch.int64)


def fit_blocks(x: Tensor, seed: int, num_sweeps: int, learn_alpha: bool) -> Fit:
    """Fit by closed-form updates, block by block."""
    guide = Guide(x, kmeans(x, seed))
    if not learn_alpha:
        guide.alpha.requires_grad_(False)
    blocks = [block for block in make_blocks(guide) if learn_alpha or block.name != "alpha"]
    vi = BlockCoordinateVI(model, guide, blocks, loss=negative_bound)
    start, bounds = time.perf_counter(), [-vi.step(x)]
    while len(bounds) <= num_sweeps:
        bounds.append(-vi.step(x))
        if bounds[-1] - bounds[-2] < TOLERANCE:
            break
    return Fit(guide, bounds[1:], time.perf_counter() - start)


def fit_sklearn(x: Tensor, seed: int, num_sweeps: int) -> Fit:
    """Scikit-learn's mixture as a guide."""
    p = prior(x)
    mixture = BayesianGaussianMixture(
        n_components=NUM_COMPONENTS,
        weight_concentration_prior_type="dirichlet_process",
        weight_concentration_prior=CONCENTRATION[0] / CONCENTRATION[1],
        mean_precision_prior=float(p.kappa),
        mean_prior=p.mean.numpy(),
        degrees_of_freedom_prior=float(p.dof),
        covariance_prior=p.scale.numpy(),
        reg_covar=0.0,
        tol=TOLERANCE,
        max_iter=num_sweeps,
        random_state=seed,
    )
    start = time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        mixture.fit(x.numpy())
    seconds = time.perf_counter() - start
    guide = Guide(x, kmeans(x, seed))
    # scikit-learn breaks as many sticks as there are components, so that its weights do not sum to one.
    guide.v.a, guide.v.b = (torch.as_tensor(value[:-1]) for value in mixture.weight_concentration_)
    mean, kappa, covariance, dof = map(
        torch.as_tensor, (mixture.means_, mixture.mean_precision_, mixture.covariances_, mixture.degrees_of_freedom_)
    )
    for name, value in NormalInverseWishart.of(mean, kappa, dof[:, None, None] * covariance, dof)._asdict().items():
        setattr(guide.components, name, value)
    guide.z.log_probs = torch.as_tensor(mixture.predict_proba(x.numpy())).log()
    return Fit(guide, [-negative_bound(model, guide, x).item()], seconds)


def best(fits: list[Fit]) -> Fit:
    """Fit with the best bound over all initial groups."""
    return max(fits, key=lambda fit: fit.bounds[-1])


# %% [markdown]
# ## Comparison
#
# All bounds are those of our function at the factors of each fit.  `effective` is the exponential of the entropy of the
# weights, `Rand` the adjusted Rand index of groups and cultivars: 1 where they are the same, 0 by chance.


# %%
def summarise(fits: dict[str, list[Fit]], cultivars: np.ndarray) -> str:
    """Bounds and groups as a markdown table."""
    lines = ["| fit | bound | worst start | weights > 1 % | effective | Rand | E α | seconds |", f"|---|{'---:|' * 7}"]
    for name, starts in fits.items():
        fit = best(starts)
        weights, alpha = fit.guide.weights(), fit.guide.alpha
        cells = [
            name,
            f"{fit.bounds[-1]:.4f}",
            f"{min(start.bounds[-1] for start in starts):.2f}",
            f"{int((weights > 0.01).sum())}",
            f"{torch.special.entr(weights).sum().exp():.3f}",
            f"{adjusted_rand_score(cultivars, fit.groups):.3f}",
            f"{alpha.shape / alpha.rate:.3f}",
            f"{sum(start.seconds for start in starts):.1f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


# %% [markdown]
# An ellipse contains 95 % of the mass of a component at its mean precision, for components with more than 1 % of the weight.


# %%
CULTIVARS = ("#332288", "#CC6677", "#117733")
SKLEARN, HELD, LEARNED = "scikit-learn, α = 1", "blocks, α = 1", "blocks, α learned"
COLOURS = {SKLEARN: "#DDCC77", HELD: "#88CCEE", LEARNED: "#882255"}


def draw(fits: dict[str, list[Fit]], x: Tensor, cultivars: np.ndarray) -> plt.Figure:
    """Components over the data, weights, and bounds from all initial groups."""
    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(13.0, 4.2), layout="constrained", width_ratios=(1.2, 1.0, 1.0))
    fit = best(fits[LEARNED])
    components, weights = fit.guide.factor(), fit.guide.weights()
    for cultivar, colour in enumerate(CULTIVARS):
        left.scatter(*x[cultivars == cultivar].T, s=14, color=colour, linewidths=0, label=f"cultivar {cultivar + 1}")
    angle = torch.linspace(0.0, 2.0 * torch.pi, 100, dtype=x.dtype)
    circle = np.sqrt(5.991) * torch.stack([angle.cos(), angle.sin()])  # χ² with two degrees of freedom, 95 %
    for c in torch.nonzero(weights > 0.01).flatten():
        scale = torch.linalg.cholesky(components.scale[c] / components.dof[c])
        left.plot(*(components.mean[c][:, None] + scale @ circle), color="0.2")
    left.set(xlabel="first principal component", ylabel="second", title="components, α learned")
    left.legend(frameon=False, fontsize="small")

    for shift, (name, starts) in zip((-0.27, 0.0, 0.27), fits.items(), strict=True):
        sizes = best(starts).guide.weights().sort(descending=True).values.numpy()
        places = np.arange(1, NUM_COMPONENTS + 1) + shift
        middle.bar(places, sizes, width=0.27, color=COLOURS[name], label=name)
    middle.set(xlabel="component, by weight", ylabel="expected weight", title="weights", xticks=range(1, NUM_COMPONENTS + 1))
    middle.legend(frameon=False, fontsize="small")

    for start in fits[LEARNED]:
        right.plot(range(1, len(start.bounds) + 1), start.bounds, color=COLOURS[LEARNED], alpha=1.0 if start is fit else 0.35)
    right.set(
        xlabel="sweep", ylabel="bound [nats]", title="all starts, α learned", xscale="log", xlim=(5, None), ylim=(-520, -460)
    )
    for ax in (left, middle, right):
        ax.spines[["top", "right"]].set_visible(False)
    return figure


# %%
def main() -> None:
    """Run the tutorial."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=1000, help="most sweeps of each fit")
    parser.add_argument("--out", type=Path, default=Path("out/dirichlet_mixture"), help="folder for the picture")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    matplotlib.use("Agg")
    pyro.settings.set(module_local_params=True)  # many guides side by side

    x, cultivars = measurements(), load_wine().target
    with torch.no_grad():
        seeds = range(NUM_STARTS)
        fits = {
            SKLEARN: [fit_sklearn(x, seed, options.steps) for seed in seeds],
            HELD: [fit_blocks(x, seed, options.steps, learn_alpha=False) for seed in seeds],
            LEARNED: [fit_blocks(x, seed, options.steps, learn_alpha=True) for seed in seeds],
        }
        print(summarise(fits, cultivars))
        draw(fits, x, cultivars).savefig(options.out / "mixture.png", dpi=110)
    print(f"\nwrote {options.out / 'mixture.png'}")


if __name__ == "__main__":
    main()
