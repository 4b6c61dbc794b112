"""Known quantities of rows, with and without: capture times, batches, sequencing depths and standard errors."""

from collections.abc import Callable, Iterator
from itertools import product
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from scipy.stats import spearmanr
from sklearn.linear_model import LinearRegression
from sklearn.model_selection import cross_val_predict
from sklearn.neighbors import KNeighborsClassifier, KNeighborsRegressor
from torch import Tensor
from torch.nn.functional import one_hot
from tqdm import tqdm

from benchmarks.core.isolated import isolated
from benchmarks.core.report import Measurement, Row, Settings
from pyro_lvgp.guides import MeanFieldGuide
from pyro_lvgp.infer import JointAdam, LRSchedule, MeanFieldELBO, fit
from pyro_lvgp.likelihoods import Gaussian, Likelihood, Poisson
from pyro_lvgp.models import BayesianGPLVM, RowArguments

NUM_THREADS = 1
NUM_ROWS, NUM_COLUMNS, NUM_INDUCING, NUM_STEPS = 300, 20, 30, 1500
PUBLISHED: list[Row] = []
NOTES = f"""\
Simulated tables of {NUM_ROWS} rows and {NUM_COLUMNS} columns; columns are smooth random functions of the true latents. A
Bayesian GPLVM with {NUM_INDUCING} inducing points is fitted with and without the argument, otherwise with the same settings,
by a mean-field guide with Adam and a learning rate of 0.03 that falls to zero.
"capture times": cells change along a path that returns to where it began, and are captured at four times, their true times
± 0.3, rounded. The prior of the only latent is the time of the capture ± 0.4. Scores are rank correlations with the true time:
of all cells, and the mean of those of the cells of one capture. "capture times alone" are the means of the prior.
"batches": four types in three batches with additive effects. Scores are leave-one-out accuracies of the nearest neighbour
among the latents; chance is the share of the largest batch, or type.
"depths": counts whose rates are in proportion to a depth that varies by a factor of about ten. The exposure is the sum of the
counts of a row. "depth R²" is that of the logarithm of the depth from the latents by ten neighbours, cross-validated, and
"latents R²" that of the true latents.
"errors": entries with known standard errors from 0.03 to 3, of functions of known inputs, which are latents with narrow
priors. Scores are those of the functions. The exact process has the kernel and the noise variance of the fit with errors."""


class Task(NamedTuple):
    """A table, the known quantities of its rows, and the scores of a fit.

    :param known: the argument under test.
    :param common: arguments of both fits; None for nothing.
    :param score: function of model, guide and data that returns scores by name.
    :param others: scores of other methods, as functions of the fitted model.
    """

    Y: Float[Tensor, "N D"]
    latent_dim: int
    known: RowArguments
    common: RowArguments | None
    likelihood: Callable[[], Likelihood]
    score: Callable[[BayesianGPLVM, MeanFieldGuide], dict[str, float]]
    others: dict[str, Callable[[BayesianGPLVM], dict[str, float]]]


def smooth_functions(x: Float[Tensor, "N Q"], lengthscale: float) -> Float[Tensor, "N D"]:
    """Draw functions of unit variance from a process with a squared exponential kernel, by random features."""
    omega = torch.randn(200, x.shape[-1]) / lengthscale
    phase = 2.0 * torch.pi * torch.rand(200)
    return (x @ omega.mT + phase).cos() @ torch.randn(200, NUM_COLUMNS) * (2.0 / 200) ** 0.5


def means(guide: MeanFieldGuide) -> Float[Tensor, "N Q"]:
    """Posterior means of the latents."""
    return guide.stored_posterior("X").mean.detach()  # type: ignore[union-attr]


def capture_times() -> Task:
    """Cells along a path that returns to where it began, captured at four times."""
    time = 3.0 * torch.rand(NUM_ROWS)
    capture = (time + 0.3 * torch.randn(NUM_ROWS)).round().clamp(0.0, 3.0)
    angle = 2.0 * torch.pi * time / 3.0
    path = torch.stack([angle.sin(), angle.cos(), 0.15 * time], -1)
    Y = smooth_functions(path, 1.0) + 0.3 * torch.randn(NUM_ROWS, NUM_COLUMNS)
    rows = RowArguments(prior_loc=(capture - 1.5)[:, None], prior_scale=0.4)

    def scores(z: Tensor) -> dict[str, float]:
        return {
            "rank correlation": abs(spearmanr(z, time).statistic),
            "within captures": float(torch.tensor([within(z, c) for c in capture.unique()]).mean()),
        }

    def within(z: Tensor, c: Tensor) -> float:
        cells = capture == c
        return 0.0 if z[cells].std() == 0.0 else abs(spearmanr(z[cells], time[cells]).statistic)

    alone = {"capture times alone": lambda model: scores(capture)}
    return Task(Y, 1, rows, None, lambda: Gaussian(0.1), lambda model, guide: scores(means(guide)[:, 0]), alone)


def batches() -> Task:
    """Four types in three batches with additive effects."""
    kind, batch = torch.randint(4, (NUM_ROWS,)), torch.randint(3, (NUM_ROWS,))
    centres = torch.tensor([[-1.5, 0.0], [1.5, 0.0], [0.0, 1.5], [0.0, -1.5]])
    x = centres[kind] + 0.3 * torch.randn(NUM_ROWS, 2)
    effects = 1.5 * torch.randn(3, NUM_COLUMNS)
    Y = smooth_functions(x, 2.0) + effects[batch] + 0.2 * torch.randn(NUM_ROWS, NUM_COLUMNS)
    rows = RowArguments(covariates=one_hot(batch, 3).to(Y))

    def accuracy(X: Tensor, labels: Int[Tensor, " N"]) -> float:
        nearest = KNeighborsClassifier(1).fit(X, labels).kneighbors(n_neighbors=1, return_distance=False)[:, 0]
        return float((labels[nearest] == labels).double().mean())

    def scores(X: Tensor) -> dict[str, float]:
        return {"1-NN batch": accuracy(X, batch), "1-NN type": accuracy(X, kind)}

    chance = {"1-NN batch": float(batch.bincount().max()) / NUM_ROWS, "1-NN type": float(kind.bincount().max()) / NUM_ROWS}
    return Task(
        Y, 2, rows, None, lambda: Gaussian(0.1), lambda model, guide: scores(means(guide)), {"chance": lambda model: chance}
    )


def depths() -> Task:
    """Counts whose rates are in proportion to depths."""
    x, depth = torch.randn(NUM_ROWS, 2), (0.7 * torch.randn(NUM_ROWS)).exp()
    rates = 10.0 * depth[:, None] * (0.7 * smooth_functions(x, 2.0)).exp()
    Y = torch.poisson(rates)
    rows = RowArguments(exposure=(Y.sum(-1) + 1.0) / Y.sum(-1).mean())

    def r2(X: Tensor, y: Tensor) -> float:
        predicted = torch.as_tensor(cross_val_predict(KNeighborsRegressor(10), X, y, cv=5))
        return float(1.0 - (y - predicted).square().mean() / y.var(correction=0))

    def scores(X: Tensor) -> dict[str, float]:
        linear = LinearRegression().fit(X, depth.log())
        of_latents = torch.tensor([r2(X, y) for y in x.mT]).mean()
        return {
            "depth R²": r2(X, depth.log()),
            "depth R², linear": float(linear.score(X, depth.log())),
            "latents R²": float(of_latents),
        }

    return Task(Y, 2, rows, None, Poisson, lambda model, guide: scores(means(guide)), {})


def errors() -> Task:
    """Entries with known standard errors, of functions of known inputs."""
    x = 4.0 * torch.rand(NUM_ROWS, 1) - 2.0
    f = smooth_functions(x, 0.7)
    error = 0.03 * 100.0 ** torch.rand(NUM_ROWS, NUM_COLUMNS)
    Y = f + error * torch.randn_like(f) + 0.1 * torch.randn_like(f)
    inputs = RowArguments(prior_loc=x, prior_scale=1e-3)
    rows = inputs.replace(RowArguments(standard_error=error))

    def rmse(mean: Tensor) -> dict[str, float]:
        return {"RMSE": float((mean - f).square().mean().sqrt())}

    @torch.no_grad()
    def exact(model: BayesianGPLVM) -> dict[str, float]:
        K, params = model.kernel(x).double(), model.likelihood.params()
        variance = (params + error.square()).double()
        residual = (Y - model.mean).double()
        columns = [K @ torch.linalg.solve(K + variance[:, d].diag(), residual[:, d]) for d in range(NUM_COLUMNS)]
        return rmse(model.mean + torch.stack(columns, -1).to(f))

    def score(model: BayesianGPLVM, guide: MeanFieldGuide) -> dict[str, float]:
        return rmse(model.reconstruct(guide, Y, num_samples=32).f_mean)

    return Task(Y, 1, rows, inputs, lambda: Gaussian(0.1), score, {"exact process": exact})


TASKS: dict[str, Callable[[], Task]] = {
    "capture times": capture_times,
    "batches": batches,
    "depths": depths,
    "errors": errors,
}


def run(*, quick: bool, seeds: int, only: str | None = None) -> Iterator[Measurement]:
    """Fit each table with and without what is known of its rows."""
    num_steps = 10 if quick else NUM_STEPS
    for name, seed in tqdm(list(product([only] if only else TASKS, range(seeds))), desc="row_arguments", unit="table"):
        yield from measure(name, seed=seed, num_steps=num_steps)


def measure(name: str, *, seed: int, num_steps: int) -> Iterator[Measurement]:
    """Simulate a table; fit it with and without the argument, and score both fits and the other methods."""
    with isolated(seed):
        task = TASKS[name]()
        settings: Settings = {"latent dimensions": task.latent_dim, "steps": num_steps}
        results: list[tuple[str, dict[str, float], float]] = []
        for method, rows in (("without", task.common), ("with", task.known)):
            model, guide, seconds = fitted(task, rows, num_steps=num_steps, seed=seed)
            results.append((method, task.score(model, guide), seconds))
        results += [(method, scores(model), 0.0) for method, scores in task.others.items()]
        for method, scores, seconds in results:
            for metric, value in scores.items():
                yield Measurement(name, method, metric, value, seconds, settings)


def fitted(task: Task, rows: RowArguments | None, *, num_steps: int, seed: int) -> tuple[BayesianGPLVM, MeanFieldGuide, float]:
    """Fit a model; return it with its guide and the wall seconds."""
    options: dict[str, Any] = {"num_inducing": NUM_INDUCING, "likelihood": task.likelihood(), "rows": rows, "seed": seed}
    model = BayesianGPLVM.from_data(task.Y, task.latent_dim, **options)
    guide = MeanFieldGuide(model)
    loss, optim = MeanFieldELBO(max_plate_nesting=1), JointAdam(lr=0.03)
    settings: dict[str, Any] = {"num_steps": num_steps, "seed": seed, "progress": False, "callbacks": [LRSchedule("cosine")]}
    history = fit(model, guide, task.Y, loss=loss, optim=optim, **settings)
    return model, guide, history.seconds[-1]
