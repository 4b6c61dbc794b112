"""Calls of all functions of arviz-stats and arviz-plots; ``python -m tests.diagnostics.arviz.functions`` writes the table."""

import contextlib
import importlib
import inspect
import io
import re
import sys
import warnings
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
from packaging.version import Version

from tests.helpers.pages import BLOCK

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "arviz_functions.md"
HEADING = "## Which functions work\n\n"
IS_OLD = Version(version("arviz-plots")) < Version("1")
ARE_INSTALLED = Version(version("arviz-plots")) >= Version("0.8") and not (
    IS_OLD and (Version(version("xarray")) >= Version("2026.4") or Version(matplotlib.__version__) >= Version("3.11"))
)
FILES = {"az": "arviz_stats", "azp": "arviz_plots"}


class NotApplicable(NamedTuple):
    """Call that fails, with the error and the reason that the table has."""

    call: str
    error: str
    reason: str


ENERGY = "energies of Hamiltonian Monte Carlo, which a guide does not have"
REFITS = "refits by a `SamplingWrapper`, for which the library has {py:func}`~pyro_lvgp.diagnostics.loo` and " + (
    "{py:func}`~pyro_lvgp.diagnostics.held_out_log_prob`"
)
UNCONSTRAINED = (
    "draws and densities of an unconstrained posterior; {py:func}`~pyro_lvgp.diagnostics.loo` integrates the latents of each "
    "datum out"
)
LENGTHSCALE = 'var_names="kernel.lengthscale"'
SENSITIVITY = f'{LENGTHSCALE}, prior_var_names="kernel.lengthscale"'
TWO = 'tree.posterior["X"].sel(latent=0), tree.posterior["X"].sel(latent=1)'

CALLS: dict[str, str | NotApplicable] = {
    "az.bayes_factor": 'az.bayes_factor(tree, var_names="kernel.variance", ref_vals=1.0)',
    "az.bayesian_r2": 'az.bayesian_r2(regression, pred_mean="mu", scale="sigma")',
    "az.bfmi": NotApplicable("az.bfmi(tree)", "energy", ENERGY),
    "az.ci_in_rope": 'az.ci_in_rope(tree, var_names="kernel.variance", rope=(0.5, 2.0))',
    "az.compare": 'az.compare({"first": elpd, "second": other_elpd})',
    "az.diagnose": "az.diagnose(tree)",
    "az.ecdf": 'az.ecdf(tree.posterior.dataset, var_names="X")',
    "az.ess": "az.ess(tree)",
    "az.eti": "az.eti(tree)",
    "az.generate_survival_curves": 'az.generate_survival_curves(durations, var_names="y", num_samples=100)',
    "az.get_function": 'az.get_function("mean")',
    "az.get_log_likelihood": 'az.get_log_likelihood(tree, var_name="y_observed")',
    "az.hdi": "az.hdi(tree)",
    "az.hexbin": f"az.hexbin({TWO})",
    "az.histogram": 'az.histogram(tree, var_names="X")',
    "az.histogram2d": f"az.histogram2d({TWO})",
    "az.iqr": "az.iqr(tree)",
    "az.kaplan_meier": 'az.kaplan_meier(durations, var_names="y")',
    "az.kde": 'az.kde(tree, var_names="X")',
    "az.kde2d": f"az.kde2d({TWO})",
    "az.kl_divergence": f"az.kl_divergence(tree, other, {LENGTHSCALE})",
    "az.lfo_cv": NotApplicable("az.lfo_cv(tree, None, 5, 1)", "SamplingWrapper", REFITS),
    "az.loo": "az.loo(tree)",
    "az.loo_approximate_posterior": 'az.loo_approximate_posterior(tree, tree.sample_stats["lp"], tree.sample_stats["lq"])',
    "az.loo_expectations": "az.loo_expectations(observed)",
    "az.loo_i": "az.loo_i(0, tree)",
    "az.loo_influence": "az.loo_influence(observed)",
    "az.loo_kfold": NotApplicable("az.loo_kfold(tree, None)", "SamplingWrapper", REFITS),
    "az.loo_metrics": "az.loo_metrics(observed)",
    "az.loo_moment_match": NotApplicable(
        "az.loo_moment_match(tree, az.loo(tree, pointwise=True), None, None)", "moment matching|upars", UNCONSTRAINED
    ),
    "az.loo_pit": "az.loo_pit(observed)",
    "az.loo_r2": 'az.loo_r2(observed, var_name="y_observed")',
    "az.loo_score": "az.loo_score(observed)",
    "az.loo_subsample": "az.loo_subsample(tree, observations=10)",
    "az.mad": "az.mad(tree)",
    "az.mcse": "az.mcse(tree)",
    "az.mean": "az.mean(tree)",
    "az.median": "az.median(tree)",
    "az.metrics": "az.metrics(observed)",
    "az.mode": f"az.mode(tree, {LENGTHSCALE})",
    "az.psense": f'az.psense(tree, {LENGTHSCALE}, group_var_names="kernel.lengthscale")',
    "az.psense_summary": f"az.psense_summary(tree, {SENSITIVITY})",
    "az.qds": 'az.qds(tree, var_names="kernel.variance")',
    "az.reloo": NotApplicable("az.reloo(None)", "SamplingWrapper", REFITS),
    "az.residual_r2": 'az.residual_r2(regression, pred_mean="mu", obs_name="y")',
    "az.rhat": "az.rhat(tree)",
    "az.rhat_nested": "az.rhat_nested(tree, superchain_ids=[0, 0, 1, 1])",
    "az.std": "az.std(tree)",
    "az.summary": f"az.summary(tree, {LENGTHSCALE})",
    "az.thin": "az.thin(tree, factor=2)",
    "az.update_subsample": "az.update_subsample(az.loo_subsample(tree, 10, pointwise=True), tree, observations=5)",
    "az.var": "az.var(tree)",
    "az.wasserstein": f"az.wasserstein(tree, other, {LENGTHSCALE}, num_samples=100)",
    "az.weight_predictions": "az.weight_predictions([regression, regression], weights=[0.7, 0.3])",
    "azp.add_bands": 'azp.add_bands(azp.plot_dist(tree, var_names="kernel.variance"), values=[(0.5, 2.0)])',
    "azp.add_lines": 'azp.add_lines(azp.plot_dist(tree, var_names="kernel.variance"), values=1.0)',
    "azp.combine_plots": f"azp.combine_plots(tree, [(azp.plot_trace, {{}}), (azp.plot_rank, {{}})], {LENGTHSCALE})",
    "azp.plot_autocorr": f"azp.plot_autocorr(tree, {LENGTHSCALE})",
    "azp.plot_bf": 'azp.plot_bf(tree, var_names="kernel.variance", ref_val=1.0)',
    "azp.plot_compare": 'azp.plot_compare(az.compare({"first": elpd, "second": other_elpd}))',
    "azp.plot_convergence_dist": "azp.plot_convergence_dist(tree)",
    "azp.plot_dgof": f"azp.plot_dgof(tree, {LENGTHSCALE})",
    "azp.plot_dgof_dist": f"azp.plot_dgof_dist(tree, {LENGTHSCALE})",
    "azp.plot_dist": f"azp.plot_dist(tree, {LENGTHSCALE})",
    "azp.plot_ecdf_pit": 'azp.plot_ecdf_pit(az.loo_pit(observed), group=None, sample_dims=["y_entry"])',
    "azp.plot_energy": NotApplicable("azp.plot_energy(tree)", "energy", ENERGY),
    "azp.plot_ess": f"azp.plot_ess(tree, {LENGTHSCALE})",
    "azp.plot_ess_evolution": f"azp.plot_ess_evolution(tree, {LENGTHSCALE})",
    "azp.plot_forest": 'azp.plot_forest(tree, var_names="X", coords={"data": [0, 1, 2]})',
    "azp.plot_khat": "azp.plot_khat(elpd)",
    "azp.plot_lm": 'azp.plot_lm(series.isel(input=0, output=0), x="x", y="y")',
    "azp.plot_loo_interval": "azp.plot_loo_interval(observed)",
    "azp.plot_loo_pava": "azp.plot_loo_pava(binary)",
    "azp.plot_loo_pit": "azp.plot_loo_pit(observed)",
    "azp.plot_mcse": f"azp.plot_mcse(tree, {LENGTHSCALE})",
    "azp.plot_pair": 'azp.plot_pair(tree, var_names="X", coords={"data": [0, 1]})',
    "azp.plot_pair_focus": f'azp.plot_pair_focus(tree, focus_var="kernel.variance", {LENGTHSCALE})',
    "azp.plot_parallel": f"azp.plot_parallel(tree, {LENGTHSCALE})",
    "azp.plot_ppc_censored": "azp.plot_ppc_censored(durations)",
    "azp.plot_ppc_dist": "azp.plot_ppc_dist(observed)",
    "azp.plot_ppc_dist_pit": "azp.plot_ppc_dist_pit(observed)",
    "azp.plot_ppc_interval": "azp.plot_ppc_interval(observed)",
    "azp.plot_ppc_pava": "azp.plot_ppc_pava(binary)",
    "azp.plot_ppc_pava_residuals": 'azp.plot_ppc_pava_residuals(binary, x_var="x")',
    "azp.plot_ppc_pit": "azp.plot_ppc_pit(observed)",
    "azp.plot_ppc_rootogram": "azp.plot_ppc_rootogram(counts)",
    "azp.plot_ppc_tstat": "azp.plot_ppc_tstat(observed)",
    "azp.plot_prior_posterior": f"azp.plot_prior_posterior(tree, {LENGTHSCALE})",
    "azp.plot_psense_dist": f"azp.plot_psense_dist(tree, {SENSITIVITY})",
    "azp.plot_psense_quantities": f"azp.plot_psense_quantities(tree, {SENSITIVITY})",
    "azp.plot_rank": f"azp.plot_rank(tree, {LENGTHSCALE})",
    "azp.plot_rank_dist": f"azp.plot_rank_dist(tree, {LENGTHSCALE})",
    "azp.plot_ridge": 'azp.plot_ridge(tree, var_names="X", coords={"data": [0, 1, 2]})',
    "azp.plot_trace": f"azp.plot_trace(tree, {LENGTHSCALE})",
    "azp.plot_trace_dist": f"azp.plot_trace_dist(tree, {LENGTHSCALE})",
}
# Functions that versions for Python 3.11 do not have.
NEW = {
    *("az.diagnose", "az.hexbin", "az.histogram2d", "az.iqr", "az.kde2d", "az.lfo_cv", "az.loo_influence", "az.mad", "az.std"),
    *("az.var", "azp.plot_loo_interval", "azp.plot_loo_pava", "azp.plot_ppc_dist_pit"),
}


def modules() -> dict[str, Any]:
    """The two packages by their short names."""
    with warnings.catch_warnings():
        # arviz-plots 0.8 looks for matplotlib.style.core, which matplotlib does not always import by itself.
        warnings.simplefilter("ignore")
        with contextlib.suppress(ModuleNotFoundError):
            importlib.import_module("matplotlib.style.core")
        return {short: importlib.import_module(name) for short, name in FILES.items()}


def public_functions() -> list[str]:
    """Names of all functions of the installed versions."""
    return [
        f"{short}.{name}"
        for short, module in modules().items()
        for name, value in vars(module).items()
        if not name.startswith("_") and callable(value) and not inspect.isclass(value)
    ]


def make_trees(changed: Callable[[str], str] = str) -> dict[str, Any]:
    """Run the blocks of the page, each changed by a function."""
    namespace = {"__name__": "page", **modules()}
    for block in BLOCK.finditer(PAGE.read_text("utf-8")):
        exec(changed(block["code"]), namespace)
    return namespace


def row(name: str, trees: dict[str, Any]) -> str:
    """Call a function, draw what it plots, and return its row of the table."""
    call = CALLS[name]
    new = " (new)" if name in NEW else ""
    pyplot = importlib.import_module("matplotlib.pyplot")
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        try:
            eval(call.call if isinstance(call, NotApplicable) else call, dict(trees))
            for number in pyplot.get_fignums():
                pyplot.figure(number).canvas.draw()
        except Exception as error:
            if not isinstance(call, NotApplicable) or not re.search(call.error, str(error)):
                raise
            return f"| `{name}`{new} | not applicable: {call.reason} |"
        finally:
            pyplot.close("all")
    if isinstance(call, NotApplicable):
        raise AssertionError(f"expected {call.call} to fail, got a result; write its call into the table")
    return f"| `{name}`{new} | `{call}` |"


def table(rows: list[str]) -> str:
    """The part of the page below its last heading."""
    return "\n".join(["| function | call |", "|---|---|", *rows, ""])


if __name__ == "__main__":
    matplotlib.use("agg")
    trees, installed = make_trees(), public_functions()
    text = PAGE.read_text("utf-8")
    before, _, committed = text.partition(HEADING)
    # The rows of functions that the installed versions do not have stay as they are.
    others = {name: line for name in CALLS for line in committed.splitlines() if line.startswith(f"| `{name}`")}
    rows = [row(name, trees) if name in installed else others.get(name) for name in CALLS]
    PAGE.write_text(f"{before}{HEADING}{table([line for line in rows if line])}", "utf-8")
    sys.exit(None in rows)
