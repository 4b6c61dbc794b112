"""GP-VAE, dense and sparse, of hidden temperatures in seen and unseen years in Trentino or Japan."""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from gpytorch.kernels import MaternKernel, RBFKernel
from pyro.distributions import Normal
from torch import Tensor, nn
from tqdm import tqdm

from benchmarks.core.isolated import isolated
from benchmarks.core.report import Measurement, Row, Settings
from benchmarks.peers.gpytorch_processes import GroupedProcess, KernelMaker, Start
from benchmarks.tasks.weather_data import JAPAN, TRENTINO, TRENTINO_1996, Source, Validation, Weather, load
from pyro_lvgp.guides import SparseStructuredGPGuide, StructuredGPGuide
from pyro_lvgp.infer import JointAdam, LRSchedule, StructuredELBO, fit
from pyro_lvgp.kernels import RBF, Matern
from pyro_lvgp.likelihoods import Gaussian
from pyro_lvgp.models import GPVAE, Prediction, SparseGPVAE, cluster_centres
from pyro_lvgp.networks import MLP, FactorNet, NeighbourNet, OffsetNet

NUM_THREADS = 1
LEARNING_RATE, NUM_SAMPLES = 0.02, 200
# Initial variance and lengthscales [100 km east, 100 km north, km of elevation, days] for each variable, of weather that
# stations share (region) and of deviations of single stations.  In Japan means have those of maxima, and snow those of rain.
REGION: dict[str, Start] = {
    "PRCP": (0.6, (1.5, 0.75, 2.2, 0.75)),
    "TMAX": (0.5, (1.5, 1.8, 3.2, 1.2)),
    "TMIN": (0.55, (2.1, 1.6, 2.5, 1.5)),
}
STATION: dict[str, Start] = {
    "PRCP": (0.1, (0.5, 0.6, 1.9, 6.0)),
    "TMAX": (0.12, (0.15, 0.15, 0.22, 9.0)),
    "TMIN": (0.14, (0.15, 0.15, 0.15, 11.0)),
}
REGION |= {"TAVG": REGION["TMAX"], "SNWD": REGION["PRCP"]}
STATION |= {"TAVG": STATION["TMAX"], "SNWD": STATION["PRCP"]}
DENSE_NU, SPARSE_NU = 0.5, 1.5  # of the Matérn kernels: few inducing points represent smooth functions better
INDUCING_SCALE = (0.3, 0.3, 0.4, 2.0)  # units of distances for k-means, between the lengthscales of both kernels


Posterior = Literal["dense", "projected", "nearest", "neighbours", "independent"]
Fit = tuple[dict[str, Prediction], float]  # predictions of the hidden entries of each part, and seconds
Moments = dict[str, tuple[Tensor, Tensor]]  # of each part
Peer = Callable[[Weather, int], Moments]  # from the number of epochs


class Decoder(nn.Module):
    """Decoder to the mean and variance of each output: a linear map, a noise variance, and a small network added to both.

    The linear map is initialised at the identity.  The output of the network is initially small.  It is divided by five, so
    that it changes slowly.

    :param data_dim: number of outputs, and of latents.
    :param skip: number of leading latents to ignore.
    """

    def __init__(self, data_dim: int, *, skip: int = 0):
        super().__init__()
        self.linear, self.net = identity(data_dim), MLP(data_dim, 2 * data_dim, (20,))
        self.raw_noise, self.skip = nn.Parameter(torch.full((data_dim,), -2.0)), skip
        with torch.no_grad():
            self.net[-1].get_parameter("weight").mul_(0.1)

    def forward(self, latents: Tensor) -> tuple[Tensor, Tensor]:
        latents = latents[..., self.skip :]
        mean, raw = (0.2 * self.net(latents)).chunk(2, -1)
        return self.linear(latents) + mean, nn.functional.softplus(self.raw_noise + raw) + 1e-4


def identity(dim: int) -> nn.Linear:
    """Create a linear layer that is initialised as the identity."""
    layer = nn.Linear(dim, dim)
    nn.init.eye_(layer.weight)
    nn.init.zeros_(layer.bias)
    return layer


@dataclass(frozen=True)
class Method:
    """Settings of a GP-VAE and its posterior.

    :param posterior: dense, or one of the sparse posteriors; the model with independent latents is a VAE.
    :param linear: whether the decoder is linear, with a noise variance for each output.
    :param num_inducing: M.
    :param num_nearest: T.
    """

    posterior: Posterior = "dense"
    linear: bool = False
    num_inducing: int = 50
    num_nearest: int = 10


THREE_DAYS = {
    "VAE": Method("independent"),
    "GP-VAE, linear decoder": Method(linear=True),
    "GP-VAE": Method(),
    "sparse GP-VAE, projected, M = 100": Method("projected", num_inducing=100),
    "sparse GP-VAE, neighbours, M = 100, T = 20": Method("neighbours", num_inducing=100, num_nearest=20),
    "sparse GP-VAE, nearest, M = 100, T = 20": Method("nearest", num_inducing=100, num_nearest=20),
}
WEEKS = {
    "VAE": Method("independent"),
    "sparse GP-VAE, linear decoder, M = 150": Method("projected", linear=True, num_inducing=150),
    "GP-VAE, linear decoder": Method(linear=True),
    "GP-VAE": Method(),
    "sparse GP-VAE, projected, M = 150": Method("projected", num_inducing=150),
    "sparse GP-VAE, projected, M = 100": Method("projected", num_inducing=100),
    "sparse GP-VAE, neighbours, M = 100, T = 20": Method("neighbours", num_inducing=100, num_nearest=20),
    "sparse GP-VAE, nearest, M = 100, T = 20": Method("nearest", num_inducing=100, num_nearest=20),
}
FORMS: tuple[Posterior, ...] = ("neighbours", "nearest")
GRID = {
    f"sparse GP-VAE, {form}, M = {M}, T = {T}": Method(form, num_inducing=M, num_nearest=T)
    for form in FORMS
    for M in (20, 50, 100)
    for T in (2, 5, 10, 20)
}
TASKS = {
    "three days": THREE_DAYS,
    "weeks": WEEKS,
    "grid": GRID,
    "three days, minima": THREE_DAYS,
    "three days, maxima": THREE_DAYS,
    "weeks, validation": WEEKS,
    "three days, Japan": THREE_DAYS,
    "weeks, Japan": WEEKS,
}
SOURCES: dict[str, Source] = {
    "grid": TRENTINO_1996,
    "three days, minima": TRENTINO_1996,
    "three days, maxima": TRENTINO_1996,
    "weeks, validation": TRENTINO_1996,
    "three days, Japan": JAPAN,
    "weeks, Japan": JAPAN,
}
VALIDATION: dict[str, Validation] = {
    "three days, minima": "minima",
    "three days, maxima": "maxima",
    "weeks, validation": "pairs",
}
POOLED = {  # of which all fits together are scored too
    "GP-VAE": ("GP-VAE",),
    "GP-VAE, both decoders": ("GP-VAE, linear decoder", "GP-VAE"),
}
EPOCHS, BATCH_SIZES = 15, {3: 4, 7: 2}
PUBLISHED: list[Row] = []
NOTES = """\
Models predict from the posteriors of their encoders, as in the thesis, without updates of sites.

The two experiments of the thesis on Japanese stations, here with the 49 stations in Trentino that have a maximum temperature
on at least half of the days. Methods are fitted to 1996 and 1997, and predict hidden temperatures of these years (seen) and of
1998 (unseen, without another fit). "three days": groups of three days, the maximum of the middle day hidden at all stations.
"weeks": groups of seven days, both temperatures of a station on a day hidden with probability 0.1 (in the thesis those of all
stations, one day in ten). "grid" (--only grid): weeks, fitted to 1996 alone, by number of inducing points M and of nearest
ones T. "nearest" is the network of the thesis over offsets and data (OffsetNet), "neighbours" a network that corrects the
prior conditional of the kernel (NeighbourNet).

A regression on season and elevation is subtracted for all methods, precipitation is log(1 + mm), and inputs are position,
elevation and day. VAE, linear decoder and the GP-VAEs have a latent process for each variable and FactorNet encoders. Kernels
of the GP-VAEs are a sum of two Matérn kernels (of smoothness 1/2; 3/2 for sparse models), one for weather that stations share,
and one for deviations of single stations, which last for days. All decoders but the linear one return a variance for each
entry. Independent GPs have one kernel for each variable with initial lengthscales of 1, or the kernels of the dense GP-VAE
with the same initial values; all kernels are learned. "together" is the equal mixture of the predictions of all seeds, or of
all seeds of both decoders. "Japan" (--only 'three days, Japan', 'weeks, Japan') is the record from which the thesis took its
data, by `ghcn_daily`: five variables of 1980 and 1981, the mean temperature of the middle day hidden, or all temperatures of a
station on a day.

Kernels, encoder, decoder, learning rates and M were selected on other entries hidden from 1996, by one to four seeds: --only
'weeks, validation'; 'three days, minima', with those of the middle day hidden; 'three days, maxima', with those of the first
or last day hidden. Exact linear multi-output processes, kernels of either smoothness, smaller networks as decoders, and
encoders with the maxima of a day hidden were evaluated on the test entries; no setting was selected by these scores.

NLL is the mean negative log density per hidden entry of a Gaussian with the predictive moments, "mixture NLL" that of the
mixture over 200 draws; both in nats per °C. Rows of one seed have no standard deviation."""


def run(*, quick: bool, seeds: int, only: str | None = None) -> Iterator[Measurement]:
    """Measure all methods on three days and weeks, or on the one task of ``only``."""
    for task in [only] if only else ["three days", "weeks"]:
        source = SOURCES.get(task, TRENTINO)
        weather = load(days_per_group(task), validation=VALIDATION.get(task), source=source)
        peers = {} if task == "grid" else PEERS
        yield from measure(task, weather, TASKS[task], peers=peers, pooled=POOLED, quick=quick, seeds=seeds)


def days_per_group(task: str) -> int:
    """Number of days in a group: 3 for the tasks of three days, 7 for those of weeks."""
    return 3 if task.startswith("three") else 7


def measure(
    task: str,
    weather: Weather,
    methods: Mapping[str, Method],
    *,
    peers: Mapping[str, Peer],
    pooled: Mapping[str, Sequence[str]],
    quick: bool,
    seeds: int,
) -> Iterator[Measurement]:
    """Fit and score peers once, methods with every seed, and the pooled fits of some methods."""
    yield from measure_peers(task, weather, peers, 1 if quick else 10)
    epochs = 1 if quick else EPOCHS
    settings: Settings = {"epochs": epochs, "groups in a batch": BATCH_SIZES[weather.days_per_group]}
    fits_to_pool: dict[str, list[Fit]] = {}
    for name, method in tqdm(methods.items(), desc=task, unit="method"):
        fits = [predictions(weather, method, seed=seed, epochs=epochs) for seed in range(seeds)]
        for predicted, seconds in fits:
            for metric, value in scores_of_mixtures(weather, predicted).items():
                yield Measurement(task, name, metric, value, seconds, settings)
        if any(name in members for members in pooled.values()):
            fits_to_pool[name] = fits
    for name, members in pooled.items():
        if seeds > 1 and fits_to_pool.keys() >= set(members):
            fits = [fit for member in members for fit in fits_to_pool[member]]
            together = {part: Prediction.pool(predicted[part] for predicted, _ in fits) for part in weather.parts}
            for metric, value in scores_of_mixtures(weather, together).items():
                total = sum(seconds for _, seconds in fits)
                yield Measurement(task, f"{name}, {len(fits)} fits together", metric, value, total, settings)


def measure_peers(task: str, weather: Weather, peers: Mapping[str, Peer], epochs: int) -> Iterator[Measurement]:
    """Fit and score each peer once."""
    for name, predict in peers.items():
        start = time.perf_counter()
        moments = predict(weather, epochs)
        for part, (mean, stddev) in moments.items():
            hidden = weather.parts[part].hidden
            truth, mean, stddev = weather.parts[part].truth[hidden], mean[hidden], stddev.expand_as(mean)[hidden]
            for metric, value in scores(part, truth, mean, stddev).items():
                yield Measurement(task, name, metric, value, time.perf_counter() - start, {})


def predictions(weather: Weather, method: Method, *, seed: int, epochs: int) -> Fit:
    """Fit one model and predict the hidden entries, standardised."""
    y, x = weather.train, weather.x
    batch_size = min(BATCH_SIZES[weather.days_per_group], len(y))
    with isolated(seed):
        model, guide = build(method, weather, seed)
        history = fit(
            lambda y, idx=None: model(x, y, idx),
            lambda y, idx=None: guide(x, y, idx),
            y,
            loss=StructuredELBO(max_plate_nesting=2),
            num_steps=epochs * (len(y) // batch_size),
            batch_size=batch_size,
            optim=JointAdam(lr=LEARNING_RATE),
            callbacks=[LRSchedule("cosine")],
            seed=seed,
            progress=False,
        )
        predicted = {
            name: entries(model.predict(guide, x, weather.data(name), num_samples=NUM_SAMPLES), part.hidden)
            for name, part in weather.parts.items()
        }
    return predicted, history.seconds[-1]


def entries(prediction: Prediction, chosen: Tensor) -> Prediction:
    """Select the prediction of some entries, as a column, since draws of all entries of many fits do not fit into memory."""
    parts = ((part.mean[:, chosen, None], part.stddev[:, chosen, None]) for part in prediction.parts)
    return Prediction(Normal(mean, stddev) for mean, stddev in parts)


def scores_of_mixtures(weather: Weather, predicted: dict[str, Prediction]) -> dict[str, float]:
    """Scores of the predictive moments, and the exact negative log density of the mixtures."""
    values: dict[str, float] = {}
    for name, part in weather.parts.items():
        of_all = (part.truth, part.centre, weather.scale.expand_as(part.truth))
        truth, centre, scale = (tensor[part.hidden][:, None] for tensor in of_all)
        values |= scores(name, truth, centre + scale * predicted[name].mean, scale * predicted[name].stddev)
        log_prob = predicted[name].log_prob((truth - centre) / scale) - scale.log()
        values[f"mixture NLL {name}"] = -log_prob.nanmean().item()
    return values


def build(method: Method, weather: Weather, seed: int) -> tuple[GPVAE | SparseGPVAE, Any]:
    """Create a model and its guide, with a latent process for each variable."""
    x, variables = weather.x, weather.source.variables
    D, P = len(variables), x.shape[-1]
    likelihood, options = Gaussian(0.1, data_dim=D), {"num_data": len(weather.train)}
    encoder: nn.Module = FactorNet(D, D, (20,), init_scale=0.3, loadings=torch.eye(D))
    if method.posterior == "independent":  # a process that the decoder ignores
        unused = RBF(P, batch_shape=(1,))
        vae = SparseGPVAE(unused, Decoder(D, skip=1), x[:1], likelihood, independent_dim=D, **options).double()
        ignored = FactorNet(D, 1, (20,)).double()
        return vae, SparseStructuredGPGuide(vae, encoders={"u": ignored, "w": encoder.double()})
    nu = DENSE_NU if method.posterior == "dense" else SPARSE_NU
    region, station = (
        Matern(P, nu, variance=torch.tensor(variances), lengthscale=torch.tensor(lengthscales), batch_shape=(D,))
        for variances, lengthscales in (zip(*map(starts.get, variables), strict=True) for starts in (REGION, STATION))
    )
    kernel = region + station
    decoder: nn.Module = identity(D) if method.linear else Decoder(D)
    if method.posterior == "dense":
        model = GPVAE(kernel, decoder, likelihood, **options).double()
        return model, StructuredGPGuide(model, encoders={"f": encoder.double()}, num_eval_site_updates=0)
    scale = torch.tensor(INDUCING_SCALE)
    Z = cluster_centres(x / scale, method.num_inducing, seed=seed) * scale
    sparse = SparseGPVAE(kernel, decoder, Z, likelihood, **options).double()
    sizes: dict[str, Any] = {"input_dim": P, "latent_dim": D, "num_nearest": method.num_nearest, "hidden_dims": (50,)}
    if method.posterior == "nearest":
        encoder = OffsetNet(encoder, D, **sizes)
    elif method.posterior == "neighbours":
        encoder = NeighbourNet(encoder, **sizes)
    return sparse, SparseStructuredGPGuide(sparse, encoders={"u": encoder.double()})


def scores(name: str, truth: Tensor, mean: Tensor, stddev: Tensor) -> dict[str, float]:
    """Error and negative log density of Gaussian predictions of hidden entries, NaN if never measured, in °C and nats."""
    error = truth - mean
    nll = 0.5 * (error / stddev).square() + stddev.log() + 0.5 * math.log(2.0 * math.pi)
    return {f"RMSE {name} [°C]": error.square().nanmean().sqrt().item(), f"NLL {name}": nll.nanmean().item()}


def mean_of_the_years(weather: Weather, epochs: int) -> Moments:
    """Mean and standard deviation of each variable in the training years."""
    train = weather.parts[weather.source.seen]
    seen = train.truth.masked_fill(train.hidden, torch.nan).flatten(0, 1)
    mean = seen.nanmean(0)
    stddev = (seen - mean).square().nanmean(0).sqrt()
    return {name: (mean.expand_as(part.truth), stddev) for name, part in weather.parts.items()}


def season_and_elevation(weather: Weather, epochs: int) -> Moments:
    """Predict by the regression on season and elevation alone."""
    return {name: (part.centre, weather.scale) for name, part in weather.parts.items()}


def independent_processes(
    weather: Weather, epochs: int, make_kernel: KernelMaker, kernels: Sequence[Mapping[str, Start]]
) -> Moments:
    """Predict by a Gaussian process for each variable over position and day (GPyTorch), with a sum of kernels for each."""
    moments: dict[str, tuple[list[Tensor], list[Tensor]]] = {name: ([], []) for name in weather.parts}
    for d, variable in enumerate(weather.source.variables):
        train = weather.train[..., d]
        starts = [kernel[variable] for kernel in kernels]
        process = GroupedProcess(weather.x, train, make_kernel=make_kernel, kernels=starts)
        process.fit(train, epochs, seed=0)
        for name in weather.parts:
            for part, moment in zip(moments[name], process.predict(weather.data(name)[..., d]), strict=True):
                part.append(moment)
    result = {}
    for name, (means, stddevs) in moments.items():
        centre = weather.parts[name].centre
        result[name] = (centre + weather.scale * torch.stack(means, -1), weather.scale * torch.stack(stddevs, -1))
    return result


SAME_KERNELS = "independent GPs, kernels of the GP-VAE (GPyTorch)"
PEERS: dict[str, Peer] = {
    "mean of the training years": mean_of_the_years,
    "season and elevation": season_and_elevation,
    "independent GPs, RBF kernel (GPyTorch)": partial(
        independent_processes, make_kernel=RBFKernel, kernels=(dict.fromkeys(REGION, (1.0, 1.0)),)
    ),
    SAME_KERNELS: partial(independent_processes, make_kernel=partial(MaternKernel, nu=DENSE_NU), kernels=(REGION, STATION)),
}
