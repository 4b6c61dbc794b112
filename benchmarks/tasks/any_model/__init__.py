"""Annealed guide beside its own base, and NUTS, on 19 Pyro models of many kinds, with nothing set."""

from collections.abc import Callable, Iterator

from tqdm import tqdm

from benchmarks.core.report import Measurement, Row, Settings
from benchmarks.tasks.any_model import hierarchies, latent_variables, regressions, supports
from benchmarks.tasks.any_model.contest import Budget, contend, nuts_moments
from benchmarks.tasks.any_model.problem import Problem
from benchmarks.tasks.any_model.table import MAX_RHAT, NUM_ERRORS, Comparison, comparison_rows, reference_rows, summary_rows
from pyro_lvgp.guides import AutoAnnealedLangevin, MeanFieldGuide

NUM_THREADS = 1
GUIDES = (MeanFieldGuide, AutoAnnealedLangevin)
NUM_STEPS = 1000
FULL = Budget(NUM_STEPS, num_evaluations=200, num_draws=1000, num_chains=4, num_transitions=500)
QUICK = Budget(50, num_evaluations=20, num_draws=100, num_chains=2, num_transitions=50)
PUBLISHED: list[Row] = []
NOTES = f"""\
Both guides have their defaults, as `fit` has: Adam with a learning rate of 0.01, `Trace_ELBO` with one draw. They start from
the same seed. MeanFieldGuide is the base from which the annealed guide starts its chains. Bounds are means of evaluations of
`Trace_ELBO`; the first bound is that before the first step. The gain is the bound of the annealed guide minus that of
MeanFieldGuide; its standard error is that of the difference. The funnel has no data: its log evidence is 0.
Moments are those of 1000 draws, of the annealed guide by `sample_posterior`.

Every model but `gplvm` and `large_gplvm` is written once, with pyroapi, and runs in Pyro and in NumPyro, in float64. Distances
are those from NUTS, of posterior means, in standard deviations, and of logarithms of standard deviations, as root mean squares
over all latent coordinates in unconstrained space; "error" is the Monte Carlo error of a distance, that of NUTS included. In
rows of NUTS the distances are its own Monte Carlo errors, and its seconds include compilation. NUTS gives no reference if its
largest split R-hat is above {MAX_RHAT}.

In the summary, which counts models, means or standard deviations are close to NUTS if their distance is at most half that of
MeanFieldGuide, or within {NUM_ERRORS:g} Monte Carlo errors. A guide that raises an error has a row with the words of the
error."""
TASKS: dict[str, Callable[[], Problem]] = {
    make.__name__: make
    for make in (
        regressions.linear_regression,
        regressions.matrix_regression,
        regressions.logistic_regression,
        regressions.student_t_regression,
        regressions.horseshoe,
        regressions.ordinal_regression,
        hierarchies.eight_schools,
        hierarchies.hierarchical_normal,
        hierarchies.binomial_glmm,
        hierarchies.poisson_exposures,
        hierarchies.random_slopes,
        latent_variables.factor_analysis,
        latent_variables.item_response,
        latent_variables.gaussian_process,
        latent_variables.gplvm,
        latent_variables.large_gplvm,
        supports.psychometric,
        supports.mixture_weights,
        supports.funnel,
    )
}


def run(*, quick: bool, seeds: int, only: str | None = None) -> Iterator[Measurement]:
    """Measure both guides on all models, or on one, for each seed; count the models on which the annealed guide is better."""
    budget = QUICK if quick else FULL
    settings: Settings = {"steps": budget.num_steps, "draws": budget.num_draws, "dtype": "float64"}
    chains: Settings = {"chains": budget.num_chains, "warm-up": budget.num_transitions, "draws": budget.num_transitions}
    by_seed: dict[int, list[Comparison]] = {seed: [] for seed in range(seeds)}
    num_references = 0
    for name in tqdm([only] if only else TASKS, desc="any_model", unit="model"):
        make, reference = TASKS[name], None
        rows: list[Measurement] = []
        if make().runs_in_numpyro:
            moments, seconds = nuts_moments(make, budget)
            rows += reference_rows(name, moments, seconds, chains)
            if moments.rhat <= MAX_RHAT:
                reference, num_references = moments, num_references + 1
        for seed, comparisons in by_seed.items():
            base, annealed = (contend(make, guide, budget, reference=reference, seed=seed) for guide in GUIDES)
            comparisons.append(Comparison(base, annealed))
            yield from comparison_rows(name, comparisons[-1], settings)
        yield from rows
    for comparisons in by_seed.values():
        yield from summary_rows(comparisons, num_references, settings)
