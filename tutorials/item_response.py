# ---
# jupyter:
#   jupytext:
#     text_representation:
#       format_name: percent
# ---
"""Item response by your own Pyro model: `python -m tutorials.item_response [--steps N] [--out FOLDER]`."""

# %% [markdown]
# # Item response
#
# 400 pupils answer 12 questions: an easy one on reading, a hard one on arithmetic, and ten word problems that need both.
# A pupil who fails at word problems may lack either skill: the posterior of the two abilities is curved, not Gaussian.
# We write the model in plain Pyro and fit it by four guides: Pyro's `AutoNormal`, Gaussians with full covariances, and
# `AutoAnnealedLangevin` with two kinds of dynamics.  As there are only two abilities, quadrature gives the exact posterior.

# %%
import argparse
import math
import time
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
import numpy as np
import pyro
import pyro.distributions as dist
import torch
from matplotlib import pyplot as plt
from pyro import poutine
from pyro.infer.autoguide import AutoGuide, AutoNormal, init_to_median
from torch import Tensor
from torch.nn.functional import softplus

from pyro_lvgp import plots
from pyro_lvgp.diagnostics import effective_sample_size, log_weights, pareto_k, to_arviz
from pyro_lvgp.guides import AutoAnnealedLangevin, MeanFieldGuide
from pyro_lvgp.guides.annealed.transitions import OverdampedLangevin, UnderdampedLangevin
from pyro_lvgp.infer import FitResult, ImportanceWeightedELBO, JointAdam, LRSchedule, MeanFieldELBO, fit

NUM_PERSONS, NUM_DRAWS, NUM_REPEATS = 400, 1000, 20
NEEDS = torch.tensor([[True, False], [False, True]] + [[True, True]] * 10)  # of each item: reading, arithmetic
NUM_ITEMS = len(NEEDS)


# %% [markdown]
# ## The model
#
# An item with difficulty $b$ and discrimination $a$ asks $\ell_q = a (x_q - b)$ of skill $q$.  Where it needs both, both must
# succeed, $p = \sigma(\ell_1) \sigma(\ell_2)$, whose logit is $-\log(e^{-\ell_1} + e^{-\ell_2} + e^{-\ell_1 - \ell_2})$.
# A skill that is not needed always succeeds: $\ell_q = \infty$.
#
# Dimensions count from the right, so that the model broadcasts over draws; `plates` passes the mini-batch to guides.


# %%
def logits(ability: Tensor, discrimination: Tensor, difficulty: Tensor) -> Tensor:
    """Probabilities of right answers [..., item], from abilities [..., skill] and item parameters [..., item]."""
    ease = discrimination[..., None] * (ability[..., None, :] - difficulty[..., None])
    reading, arithmetic = ease.masked_fill(~NEEDS, math.inf).unbind(-1)
    return -torch.stack([-reading, -arithmetic, -reading - arithmetic]).logsumexp(0)


def model(answers: Tensor | None, idx: Tensor | None = None) -> Tensor:
    """Two parameters for each item, two abilities for each person."""
    discrimination = pyro.sample("discrimination", dist.LogNormal(torch.ones(NUM_ITEMS), 0.5).to_event(1))
    difficulty = pyro.sample("difficulty", dist.Normal(torch.zeros(NUM_ITEMS), 1.0).to_event(1))
    with pyro.plate("persons", NUM_PERSONS, subsample=idx):
        ability = pyro.sample("ability", dist.Normal(torch.zeros(2), 1.0).to_event(1))
        likelihood = dist.Bernoulli(logits=logits(ability, discrimination, difficulty)).to_event(1)
        return pyro.sample("answers", likelihood, obs=answers)


def plates(answers: Tensor, idx: Tensor | None = None) -> pyro.plate:
    """Return the plate that a mini-batch subsamples."""
    return pyro.plate("persons", NUM_PERSONS, subsample=idx)


def simulate() -> Tensor:
    """Answers [person, item], 1 where right, by the model with given items."""
    difficulty = torch.cat([torch.tensor([-1.5, 1.5]), torch.linspace(-1.5, 1.0, NUM_ITEMS - 2)])
    pyro.set_rng_seed(0)
    return poutine.condition(model, {"discrimination": torch.full((NUM_ITEMS,), 4.0), "difficulty": difficulty})(None)


# %% [markdown]
# ## Four guides
#
# All have mean-field Gaussians for the items.  They differ in the abilities: factorised Gaussians; Gaussians with a
# correlation; and annealed chains of eight Langevin transitions from a factorised Gaussian to the posterior, whose
# step sizes and temperatures are learned.  Bound, steps, learning rate, mini-batches and seed are the same.

# %%
AUTO_NORMAL, FULL, ANNEALED = "AutoNormal", "full covariance", "annealed, underdamped"
COLOURS = {AUTO_NORMAL: "#332288", FULL: "#CC6677", ANNEALED: "#117733"}
PAPER = {"step_size": 0.2, "base_weight": 0.0}  # with bases of fixed first scales and transitions that are not tamed
Guides = dict[str, AutoGuide]


def base() -> MeanFieldGuide:
    """Base of an annealed guide."""
    return MeanFieldGuide(model, create_plates=plates)


def make_guides() -> Guides:
    """Guides by name."""
    chain: dict[str, Any] = {"local_plate": "persons", "num_steps": 8, "create_plates": plates, **PAPER}
    return {
        AUTO_NORMAL: AutoNormal(model, init_loc_fn=init_to_median, create_plates=plates),
        FULL: MeanFieldGuide(model, covariance={"ability": "full"}, create_plates=plates),
        ANNEALED: AutoAnnealedLangevin(model, dynamics=UnderdampedLangevin(math.inf), base_guide=base(), **chain),
        "annealed, overdamped": AutoAnnealedLangevin(model, dynamics=OverdampedLangevin(math.inf), base_guide=base(), **chain),
    }


def fit_all(guides: Guides, answers: Tensor, num_steps: int) -> dict[str, FitResult]:
    """Fit each guide in the same way."""
    how = {"num_steps": num_steps, "batch_size": 200, "callbacks": [LRSchedule("cosine")]}
    histories = {}
    for name, guide in guides.items():
        print(f"\n{name}")
        histories[name] = fit(
            model, guide, answers, loss=MeanFieldELBO("persons", num_samples=4), optim=JointAdam(lr=0.05), **how
        )
    return histories


# %% [markdown]
# ## The exact posterior
#
# At given items, a grid over the two abilities gives the posterior and the evidence $\log p(y_n \mid \text{items})$ of each
# person.  So we fix the items at the medians of each guide, and compare its draws and weights with the exact posterior there.
# `log_weights` gives $\log w_{sn} = \log p(y_n, x_{ns}) - \log q(x_{ns})$.  Its mean is lower than the evidence by the KL
# divergence of guide and posterior; for chains, by that of whole paths, which is an upper bound on that of their ends.

# %%
AXIS = torch.linspace(-5.0, 5.0, 161)
GRID = torch.cartesian_prod(AXIS, AXIS)


class Verdict(NamedTuple):
    """Draws from a guide and the exact posterior, for the same items."""

    log_w: Tensor  # log weights [draw, person]
    draws: Tensor  # abilities [draw, person, skill]
    gap: Tensor  # evidence minus bound [person]
    posterior: Tensor  # exact probabilities [person, point of the grid]
    guessed: Tensor  # probability that reading is weaker [person], by the draws
    weighted: Tensor  # the same, with weights
    exact: Tensor  # the same, by quadrature


def judge(guide: AutoGuide, answers: Tensor) -> Verdict:
    """Draw from a guide, and integrate on the grid."""
    items = {name: value for name, value in guide.median(answers).items() if name != "ability"}
    guide_given = poutine.block(poutine.condition(guide, items), hide=list(items))
    drawn = []

    def recorded(*args: Tensor) -> None:
        drawn.append(guide_given(*args)["ability"])

    model_given = poutine.condition(model, items)
    log_w = log_weights(model_given, recorded, answers, num_samples=NUM_DRAWS, local_plate="persons")
    draws = drawn[-1]
    reading_weaker = (draws[..., 0] < draws[..., 1]).float()

    f = logits(GRID, **items)
    prior = dist.Normal(torch.zeros(2), 1.0).to_event(1).log_prob(GRID)
    log_joint = answers @ f.T - softplus(f).sum(-1) + prior + 2.0 * (AXIS[1] - AXIS[0]).log()
    log_evidence = log_joint.logsumexp(-1, keepdim=True)
    posterior = (log_joint - log_evidence).exp()
    gap = log_evidence[:, 0] - log_w.mean(0)
    guessed, weighted = reading_weaker.mean(0), (log_w.softmax(0) * reading_weaker).sum(0)
    exact = posterior @ (0.5 + 0.5 * (GRID[:, 1] - GRID[:, 0]).sign())
    return Verdict(log_w, draws, gap, posterior, guessed, weighted, exact)


# %% [markdown]
# ## Which guide is better?
#
# The bounds are on the evidence of all data, items included, per person, with the Monte Carlo standard error over 20 draws of
# the items; S draws for each person are inside the logarithm.  The rest is at given items: the gap to the evidence; the
# effective number of 1000 weighted draws, for the median person; the share of persons with a Pareto k̂ above 0.7, where
# importance weights are unreliable; and the mean error of the probability P that reading is weaker, by draws and weighted
# draws.


# %%
def estimate(num_samples: int, guide: AutoGuide, answers: Tensor) -> str:
    """Bound per person, with its standard error."""
    loss = ImportanceWeightedELBO("persons", num_samples, max_plate_nesting=1)
    pyro.set_rng_seed(0)
    values = -np.array([loss.loss(model, guide, answers) for _ in range(NUM_REPEATS)]) / NUM_PERSONS
    return f"{values.mean():.3f} ± {values.std(ddof=1) / math.sqrt(len(values)):.3f}"


def summarise(guides: Guides, histories: dict[str, FitResult], verdicts: dict[str, Verdict], answers: Tensor) -> str:
    """Comparison of the guides as a markdown table."""
    head = "abilities by | bound, S = 1 | S = 10 | S = 100 | gap | ESS | k̂ > 0.7 | error of P | weighted | seconds"
    lines = [f"| {head} |", f"|---|{'---:|' * 9}"]
    for name, verdict in verdicts.items():
        cells = [
            name,
            *(estimate(num_samples, guides[name], answers) for num_samples in (1, 10, 100)),
            f"{verdict.gap.mean():.3f}",
            f"{effective_sample_size(verdict.log_w).median():.0f}",
            f"{(pareto_k(verdict.log_w) > 0.7).float().mean():.1%}",
            *(f"{(guess - verdict.exact).abs().mean():.3f}" for guess in (verdict.guessed, verdict.weighted)),
            f"{histories[name].seconds[-1]:.0f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


# %% [markdown]
# ## Figures
#
# First the posteriors of four pupils, chosen by the error of `AutoNormal`.  Grey is the exact posterior, with 20,
# 50, 80 and 95 % of its mass; dots are unweighted draws; ellipses contain 50 and 95 % of the mass of a Gaussian.


# %%
def draw_posteriors(verdicts: dict[str, Verdict], answers: Tensor) -> plt.Figure:
    """Posteriors of four pupils under each guide."""
    order = verdicts[AUTO_NORMAL].gap.argsort(descending=True)
    pupils = {"AutoNormal's worst": 0.0, "its 99th percentile": 0.01, "its 90th percentile": 0.1, "its median": 0.5}
    figure, axes = plt.subplots(3, 4, figsize=(10.5, 8.4), sharex=True, sharey=True, layout="constrained")
    figure.supxlabel("reading")
    for row, name in zip(axes, (AUTO_NORMAL, FULL, ANNEALED), strict=True):
        verdict = verdicts[name]
        row[0].set_ylabel(f"{name}\n\narithmetic")
        for ax, (label, share) in zip(row, pupils.items(), strict=True):
            n = int(order[int(share * NUM_PERSONS)])
            density, draws = verdict.posterior[n], verdict.draws[:, n]
            ranked = density.sort(descending=True).values
            levels = [float(ranked[(ranked.cumsum(0) < mass).sum()]) for mass in (0.95, 0.8, 0.5, 0.2)]
            ax.contourf(AXIS, AXIS, density.view(len(AXIS), -1).T, [*levels, 1.0], colors=["0.90", "0.80", "0.67", "0.55"])
            ax.scatter(*draws[:300].T, s=5, color=COLOURS[name], alpha=0.8, linewidths=0)
            if name != ANNEALED:
                normal = dist.MultivariateNormal(draws.mean(0), draws.T.cov()).log_prob(GRID)
                relative = (normal - normal.max()).exp()  # 1 − mass inside
                ax.contour(AXIS, AXIS, relative.view(len(AXIS), -1).T, [0.05, 0.5], colors=COLOURS[name])
            text = f"gap {verdict.gap[n]:.2f} nats\nP(reading weaker) = {verdict.guessed[n]:.2f}\n"
            text += f"weighted {verdict.weighted[n]:.2f}, exact {verdict.exact[n]:.2f}"
            ax.text(0.97, 0.97, text, transform=ax.transAxes, ha="right", va="top", fontsize="small")
            ax.set(xlim=(-3.8, 3.8), ylim=(-3.6, 4.0), aspect="equal")
            if name == AUTO_NORMAL:
                ax.set_title(f"{label}\n{int(answers[n].sum())} of {NUM_ITEMS} right", fontsize="medium")
    return figure


# %% [markdown]
# A posterior predictive check uses the data only: replicated answers of the same pupils give the number of pupils with each
# total score, to compare with the observed number.


# %%
def draw_scores(trees: dict[str, Any], answers: Tensor) -> plt.Figure:
    """Numbers of persons by total score: observed, and replicated with 90 % intervals."""
    scores = np.arange(NUM_ITEMS + 1)
    figure, ax = plt.subplots(figsize=(7.0, 3.4), layout="constrained")
    ax.bar(scores, np.bincount(answers.sum(1).long(), minlength=len(scores)), color="#DDDDDD", width=0.9, label="observed")
    for shift, (name, tree) in zip((-0.15, 0.15), trees.items(), strict=True):
        totals = tree.posterior_predictive["answers"].sum("item").values[0].astype(int)
        counts = np.stack([np.bincount(total, minlength=len(scores)) for total in totals])
        low, middle, high = np.quantile(counts, [0.05, 0.5, 0.95], axis=0)
        style = {"fmt": "o", "markersize": 4, "color": COLOURS[name], "label": f"replicated, {name}"}
        ax.errorbar(scores + shift, middle, [middle - low, high - middle], **style)
    ax.set(xlabel="right answers", ylabel="persons", xticks=scores)
    ax.legend(frameon=False, fontsize="small")
    return figure


# %%
def main() -> None:
    """Run the tutorial."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=1000, help="steps of each fit")
    parser.add_argument("--out", type=Path, default=Path("out/item_response"), help="folder for pictures and posterior")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    matplotlib.use("Agg")
    pyro.settings.set(module_local_params=True)  # four guides side by side
    start = time.perf_counter()

    answers, guides = simulate(), make_guides()
    histories = fit_all(guides, answers, options.steps)
    verdicts = {name: judge(guide, answers) for name, guide in guides.items()}
    print("\n" + summarise(guides, histories, verdicts, answers) + "\n")

    dims = {"ability": ["skill"], "discrimination": ["item"], "difficulty": ["item"], "answers": ["item"]}
    trees = {
        name: to_arviz(model, guides[name], answers, num_samples=200, seed=0, dims=dims) for name in (AUTO_NORMAL, ANNEALED)
    }
    trees[ANNEALED].to_netcdf(options.out / "posterior.nc")
    values = {name: -np.asarray(history.losses) for name, history in histories.items()}
    seconds = {name: np.asarray(history.seconds) for name, history in histories.items()}
    bounds = plots.plot_bounds(values, seconds=seconds, per=NUM_PERSONS, ylabel="bound per person [nats]")
    bounds.figure.savefig(options.out / "bounds.png", dpi=110)
    for name, figure in ("posteriors", draw_posteriors(verdicts, answers)), ("scores", draw_scores(trees, answers)):
        for ax in figure.axes:
            ax.spines[["top", "right"]].set_visible(False)
        figure.savefig(options.out / f"{name}.png", dpi=110)
    print(f"wrote pictures and posterior to {options.out} in {time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
