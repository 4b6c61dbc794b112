"""Seconds of a training step of GP-VAEs, dense and in linear time, beside plain PyTorch and GPyTorch."""

import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import gpytorch
import numpy as np
import pyro
import torch
from jaxtyping import Float
from torch import Tensor
from tqdm import tqdm

from benchmarks.core.report import Measurement, Row, Settings
from benchmarks.peers.plain_gp_vae import PlainGPVAE
from pyro_lvgp._utils.seeding import seeded
from pyro_lvgp.guides import StructuredGPGuide
from pyro_lvgp.guides.structured import Method
from pyro_lvgp.infer import JointAdam, StructuredELBO, fit
from pyro_lvgp.kernels import Matern
from pyro_lvgp.likelihoods import Gaussian
from pyro_lvgp.models import GPVAE
from pyro_lvgp.networks import MLP, IndexNet

NUM_THREADS, NUM_SEEDS = 1, 1
LATENT_DIM, DATA_DIM, LENGTHSCALE, VARIANCE, MISSING, NUM_INDUCING, LEARNING_RATE = 2, 4, 20.0, 0.1, 0.3, 200, 5e-3
TASKS = {"N = 250": (250, 300), "N = 1000": (1000, 40), "N = 10 000": (10_000, 5), "N = 100 000": (100_000, 3)}
MAX_DENSE, NUM_DRAWS = 1000, 200
OURS, GRAPH, DENSE, PLAIN = "pyro_lvgp", "pyro_lvgp, as a graph", "pyro_lvgp, dense", "plain PyTorch, dense"
EXACT, SPARSE = f"GPyTorch {gpytorch.__version__}, exact", f"GPyTorch {gpytorch.__version__}, SVGP"
PUBLISHED: list[Row] = []
NOTES = f"""\
A GP-VAE of two Matérn-3⁄2 processes, an IndexNet encoder, a decoder with twenty hidden units, and four outputs of which 30 %
of the entries are missing; all points are in each step, float64. Ours is in linear time, by state-space models, the default
of the guide for these kernels; "as a graph" is `fit(compile="torchscript")`, the default in fits of 1000 steps or more;
"dense" is `StructuredGPGuide(method="dense")`, which other kernels need. "plain PyTorch" is the same bound with the same
networks and dense matrices, written out without Pyro (`benchmarks/peers/plain_gp_vae.py`): "first bound", nats per point at
the first values, the mean of {NUM_DRAWS} draws, agrees. GPyTorch has no GP-VAE. What it is shown for is the cost of a step
on the same inputs: the exact marginal likelihood of a process for each of the four outputs, without missing entries; and,
for long series, its sparse variational processes (SVGP) with {NUM_INDUCING} inducing points for each output. "step" is the
median; run it with `taskset -c 0`."""


def run(*, quick: bool, seeds: int, only: str | None = None) -> Iterator[Measurement]:
    """Measure all methods for each seed at all lengths, or at one."""
    for name, seed in tqdm(list(itertools.product([only] if only else TASKS, range(seeds))), desc="speed_gp_vae"):
        num, num_steps = TASKS[name]
        t, y, complete = series(num, seed=seed)
        for method in methods(num):
            if quick and num > 1000:
                continue
            data = complete if method in (EXACT, SPARSE) else y
            seconds, bound = METHODS[method](t, data, 4 if quick else num_steps + 1, seed)
            step = statistics.median(seconds[1:])
            settings: Settings = {"steps": num_steps, "Q": LATENT_DIM, "D": DATA_DIM}
            yield Measurement(name, method, "step [ms]", 1e3 * step, sum(seconds), settings)
            if bound is not None:
                yield Measurement(name, method, "first bound", bound, sum(seconds), settings)


def methods(num: int) -> tuple[str, ...]:
    """Names of the methods for a series of a length."""
    return (OURS, GRAPH, DENSE, PLAIN, EXACT) if num <= MAX_DENSE else (OURS, GRAPH, SPARSE)


def series(num: int, *, seed: int) -> tuple[Float[Tensor, "N 1"], Float[Tensor, "N D"], Float[Tensor, "N D"]]:
    """Draw inputs, data with missing entries, and the same data without."""
    with seeded(seed):
        t = torch.arange(num, dtype=torch.float64)[:, None]
        complete = torch.sin(t / LENGTHSCALE + torch.arange(DATA_DIM)) + 0.3 * torch.randn(num, DATA_DIM).double()
        return t, complete.masked_fill(torch.rand(num, DATA_DIM) < MISSING, torch.nan), complete


Result = tuple[list[float], float | None]


def networks(seed: int) -> tuple[IndexNet, MLP]:
    """Encoder and decoder with random first values."""
    with seeded(seed):
        return IndexNet(DATA_DIM, LATENT_DIM).double(), MLP(LATENT_DIM, DATA_DIM, (20,)).double()


def ours(t: Tensor, y: Tensor, num_steps: int, seed: int, *, compile: str | bool, method: Method = "auto") -> Result:
    """Train ours."""
    pyro.clear_param_store()
    encoder, decoder = networks(seed)
    kernel = Matern(1, 1.5, lengthscale=LENGTHSCALE, batch_shape=(LATENT_DIM,))
    model = GPVAE(kernel, decoder, Gaussian(VARIANCE)).double()
    guide = StructuredGPGuide(model, encoders={"f": encoder}, method=method)
    loss, bound = StructuredELBO(), None
    if not compile and len(t) <= MAX_DENSE:
        guide(t, y)
        with seeded(seed), torch.no_grad():
            bound = -statistics.fmean(loss.loss(model, guide, t, y) for _ in range(NUM_DRAWS)) / len(t)
    options: dict[str, Any] = {"optim": JointAdam(LEARNING_RATE), "loss": loss, "compile": compile, "progress": False}
    history = fit(model, guide, t, y, num_steps=num_steps, seed=seed, **options)
    return np.diff(history.seconds, prepend=0.0).tolist(), bound


def plain(t: Tensor, y: Tensor, num_steps: int, seed: int) -> Result:
    """Train the same bound in plain PyTorch."""
    encoder, decoder = networks(seed)
    model = PlainGPVAE(encoder, decoder, lengthscale=LENGTHSCALE, latent_dim=LATENT_DIM, variance=VARIANCE)
    with seeded(seed), torch.no_grad():
        bound = statistics.fmean(model(t, y).item() for _ in range(NUM_DRAWS)) / len(t)
    with seeded(seed):
        return _train(lambda: -model(t, y), list(model.parameters()), num_steps), bound


class _Processes(gpytorch.models.ExactGP):
    """Independent processes of the outputs."""

    def __init__(self, t: Tensor, y: Tensor, likelihood: gpytorch.likelihoods.Likelihood):
        super().__init__(t, y, likelihood)
        self.mean_module, self.covar_module = _mean_and_kernel()

    def forward(self, t: Tensor) -> gpytorch.distributions.MultivariateNormal:
        return gpytorch.distributions.MultivariateNormal(self.mean_module(t), self.covar_module(t))


class _SparseProcesses(gpytorch.models.ApproximateGP):
    """Sparse variational processes of the outputs."""

    def __init__(self, inducing_points: Tensor):
        batch = torch.Size([DATA_DIM])
        posterior = gpytorch.variational.CholeskyVariationalDistribution(NUM_INDUCING, batch_shape=batch)
        super().__init__(gpytorch.variational.VariationalStrategy(self, inducing_points, posterior))
        self.mean_module, self.covar_module = _mean_and_kernel()

    def forward(self, t: Tensor) -> gpytorch.distributions.MultivariateNormal:
        return gpytorch.distributions.MultivariateNormal(self.mean_module(t), self.covar_module(t))


def _mean_and_kernel() -> tuple[gpytorch.means.Mean, gpytorch.kernels.Kernel]:
    batch = torch.Size([DATA_DIM])
    base = gpytorch.kernels.MaternKernel(nu=1.5, batch_shape=batch)
    base.lengthscale = LENGTHSCALE
    return gpytorch.means.ZeroMean(batch_shape=batch), gpytorch.kernels.ScaleKernel(base, batch_shape=batch)


def exact(t: Tensor, y: Tensor, num_steps: int, seed: int) -> Result:
    """Maximise exact marginal likelihoods in GPyTorch, by Cholesky factorisation."""
    likelihood = gpytorch.likelihoods.GaussianLikelihood(batch_shape=torch.Size([DATA_DIM])).double()
    model = _Processes(t.expand(DATA_DIM, -1, -1), y.mT, likelihood).double().train()
    marginal = gpytorch.mlls.ExactMarginalLogLikelihood(likelihood, model)

    def loss() -> Tensor:
        return -marginal(model(*model.train_inputs), y.mT).sum()

    with gpytorch.settings.fast_computations(False, False, False):
        return _train(loss, list(model.parameters()), num_steps), None


def svgp(t: Tensor, y: Tensor, num_steps: int, seed: int) -> Result:
    """Maximise the bound of sparse variational processes in GPyTorch."""
    likelihood = gpytorch.likelihoods.GaussianLikelihood(batch_shape=torch.Size([DATA_DIM])).double()
    inducing_points = torch.linspace(0.0, float(t[-1]), NUM_INDUCING).double()[:, None].expand(DATA_DIM, -1, -1)
    model = _SparseProcesses(inducing_points.clone()).double().train()
    bound = gpytorch.mlls.VariationalELBO(likelihood, model, num_data=len(t))
    parameters = [*model.parameters(), *likelihood.parameters()]
    return _train(lambda: -bound(model(t.expand(DATA_DIM, -1, -1)), y.mT).sum(), parameters, num_steps), None


def _train(loss: Callable[[], Tensor], parameters: list[Tensor], num_steps: int) -> list[float]:
    """Take steps of Adam; return the wall seconds of each."""
    optim, seconds = torch.optim.Adam(parameters, LEARNING_RATE, fused=True), []
    for _ in range(num_steps):
        start = time.perf_counter()
        optim.zero_grad()
        loss().backward()
        optim.step()
        seconds.append(time.perf_counter() - start)
    return seconds


METHODS: dict[str, Callable[[Tensor, Tensor, int, int], Result]] = {
    OURS: lambda *args: ours(*args, compile=False),
    DENSE: lambda *args: ours(*args, compile=False, method="dense"),
    GRAPH: lambda *args: ours(*args, compile="torchscript"),
    PLAIN: plain,
    EXACT: exact,
    SPARSE: svgp,
}
