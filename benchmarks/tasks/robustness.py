"""Robustness: brief fits of a thousand hostile configurations of models, guides, bounds, likelihoods, kernels and data."""

import logging
import random
import re
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from itertools import islice
from typing import Any

import torch
from pyro.infer import Trace_ELBO, TraceMeanField_ELBO
from torch import Tensor, nn
from tqdm import tqdm

from benchmarks.core.isolated import isolated
from benchmarks.core.report import Measurement, Row
from pyro_lvgp.guides import (
    AutoAnnealedLangevin,
    MeanFieldGuide,
    RandomFeatureGuide,
    SparseStructuredGPGuide,
    StructuredGPGuide,
)
from pyro_lvgp.infer import ImportanceWeightedELBO, MeanFieldELBO, StructuredELBO, fit
from pyro_lvgp.kernels import RBF, Cosine, Linear, Matern, Periodic
from pyro_lvgp.likelihoods import (
    Bernoulli,
    Binomial,
    Gaussian,
    LogNormal,
    LowRankGaussian,
    NegativeBinomial,
    Ordinal,
    Poisson,
    StudentT,
)
from pyro_lvgp.models import GPVAE, BayesianGPLVM, LinearGPVAE, RandomFeatureLVM, SparseGPVAE
from pyro_lvgp.networks import MLP, FactorNet, IndexNet, ZeroImputation
from pyro_lvgp.sklearn import GPLVM

NUM_THREADS = 1
NUM_CONFIGURATIONS, NUM_STEPS = 1000, 3
PUBLISHED: list[Row] = []
NOTES = f"""\
Each configuration is drawn at random, with the seed of the row: a model, a guide, a bound, a likelihood, a kernel, and data
of some hostile kind, scale and precision. It is initialised, fitted for {NUM_STEPS} steps, and predicts once. "fine": all
losses, parameters and predictions are finite. "clear errors": a ValueError or TypeError that says what was expected and what
was given, or a warning that predictions overflow. "failures": everything else, listed by configuration. The last
table counts the clear errors by their text."""

SCALES = [10.0**exponent for exponent in (-8, -6, -4, -2, 0, 2, 4, 6, 8)]
KINDS = [
    "normal",
    "offset",
    "one column constant",
    "all constant",
    "rows duplicated",
    "columns duplicated",
    "a column empty",
    "a row empty",
    "99 % missing",
    "an outlier",
    "an infinite entry",
    "one row",
    "one column",
    "inducing points > rows",
    "equal inputs",
    "nearly equal inputs",
]
SUPPORTS: dict[str, Callable[[Tensor, float], Tensor]] = {
    "real": lambda y, scale: scale * y,
    "positive": lambda y, scale: scale * y.clamp(-20.0, 20.0).exp(),
    "count": lambda y, scale: (min(max(scale, 1.0), 1e7) * y.clamp(-5.0, 5.0).exp()).round(),
    "binary": lambda y, scale: (y > min(scale - 1.0, 3.0)).to(y),
    "share": lambda y, scale: (min(max(scale, 1.0), 1e6) * torch.sigmoid(y)).floor(),
    "level": lambda y, scale: (2.0 * torch.sigmoid(y) + 0.5).floor(),
}
LIKELIHOODS: dict[str, tuple[str, Callable[[Tensor, float], Any]]] = {
    "default": ("real", lambda Y, scale: None),
    "Gaussian": ("real", lambda Y, scale: Gaussian(min(max(scale**2, 1e-12), 1e12))),
    "Gaussian per column": ("real", lambda Y, scale: Gaussian(data_dim=Y.shape[1])),
    "StudentT": ("real", lambda Y, scale: StudentT()),
    "LowRankGaussian": ("real", lambda Y, scale: LowRankGaussian(1, Y.shape[1])),
    "LogNormal": ("positive", lambda Y, scale: LogNormal()),
    "Poisson": ("count", lambda Y, scale: Poisson()),
    "NegativeBinomial": ("count", lambda Y, scale: NegativeBinomial()),
    "Bernoulli": ("binary", lambda Y, scale: Bernoulli()),
    "Binomial": ("share", lambda Y, scale: Binomial(int(min(max(scale, 1.0), 1e6)))),
    "Ordinal": ("level", lambda Y, scale: Ordinal.from_data(Y)),
    "Gaussian for counts": ("count", lambda Y, scale: Gaussian()),
    "Poisson for real numbers": ("real", lambda Y, scale: Poisson()),
}
KERNELS: dict[str, Callable[..., Any]] = {
    "RBF": RBF,
    "Matern 1/2": lambda dim, **options: Matern(dim, 0.5, **options),
    "Matern 3/2": lambda dim, **options: Matern(dim, 1.5, **options),
    "Matern 5/2": lambda dim, **options: Matern(dim, 2.5, **options),
    "Periodic": Periodic,
    "Linear": lambda dim, lengthscale, **options: Linear(dim, **options),
    "Cosine": lambda dim, lengthscale, **options: Cosine(dim, lengthscale, **options),
    "RBF + Linear": lambda dim, lengthscale, **options: RBF(dim, lengthscale=lengthscale, **options) + Linear(dim, **options),
    "RBF x Periodic": lambda dim, **options: RBF(dim, **options) * Periodic(dim, **options),
}
GUIDES: dict[str, list[str]] = {
    "BayesianGPLVM": ["mean field", "mean field, full", "mean field, encoder", "annealed", "annealed, local"],
    "RandomFeatureLVM": ["random features", "random features, explicit", "mean field"],
    "GPVAE": ["structured, IndexNet", "structured, FactorNet", "structured", "mean field"],
    "SparseGPVAE": ["sparse structured, FactorNet", "sparse structured"],
    "LinearGPVAE": ["own"],
    "GPLVM (scikit-learn)": ["own"],
}
BOUNDS: dict[str, Callable[[], Any]] = {
    "Trace_ELBO": Trace_ELBO,
    "TraceMeanField_ELBO": TraceMeanField_ELBO,
    "MeanFieldELBO": MeanFieldELBO,
    "ImportanceWeightedELBO": lambda: ImportanceWeightedELBO(num_samples=2),
    "StructuredELBO": StructuredELBO,
}
USES = ["predict", "reconstruct or predict elsewhere", "impute", "infer_latents or forecast"]


@dataclass(frozen=True)
class Configuration:
    """A model, a guide, a bound, and hostile data.

    :param seed: seed of data and initial values.
    """

    model: str
    guide: str
    bound: str
    likelihood: str
    kernel: str
    lengthscale: float
    kind: str
    scale: float
    input_scale: float
    dtype: str
    mini_batches: bool
    use: str
    seed: int

    def __str__(self) -> str:
        return ", ".join(f"{name} {value}" for name, value in asdict(self).items())


def configurations(seed: int) -> Iterator[Configuration]:
    """Draw configurations without end."""
    generator = random.Random(seed)
    while True:
        model = generator.choice(list(GUIDES))
        yield Configuration(
            model=model,
            guide=generator.choice(GUIDES[model]),
            bound=generator.choice(list(BOUNDS)),
            likelihood=generator.choice(list(LIKELIHOODS)),
            kernel=generator.choice(list(KERNELS)),
            lengthscale=generator.choice([1e-3, 0.1, 1.0, 1e3]),
            kind=generator.choice(KINDS),
            scale=generator.choice(SCALES),
            input_scale=generator.choice([1e-8, 1.0, 1.0, 1.0, 1e8]),
            dtype=generator.choice(["float32", "float64"]),
            mini_batches=generator.random() < 0.25,
            use=generator.choice(USES),
            seed=generator.randrange(2**31),
        )


def run(*, quick: bool, seeds: int) -> Iterator[Measurement]:
    """Try all configurations of every seed, and count outcomes by model and by kind of data."""
    num = 40 if quick else NUM_CONFIGURATIONS
    for seed in range(seeds):
        tried: list[tuple[Configuration, str, str, float]] = []
        for configuration in tqdm(islice(configurations(seed), num), total=num, desc=f"robustness, seed {seed}"):
            start = time.perf_counter()
            outcome, text = try_configuration(configuration)
            tried.append((configuration, outcome, text, time.perf_counter() - start))
        yield from _counts("all", tried, lambda configuration: "all")
        yield from _counts("by model", tried, lambda configuration: configuration.model)
        yield from _counts("by likelihood", tried, lambda configuration: configuration.likelihood)
        yield from _counts("by data", tried, lambda configuration: configuration.kind)
        for configuration, outcome, text, seconds in tried:
            if outcome == "failures":
                yield Measurement("failures", f"{text} ({configuration})", "count", 1.0, seconds, {"steps": NUM_STEPS})
        errors = [text for _, outcome, text, _ in tried if outcome == "clear errors"]
        seconds = sum(seconds for *_, seconds in tried) / num
        for text, count in Counter(errors).most_common():
            yield Measurement(f"clear errors, seed {seed}", text, "count", count, seconds, {"steps": NUM_STEPS})


def _counts(
    dataset: str, tried: list[tuple[Configuration, str, str, float]], group: Callable[[Configuration], str]
) -> Iterator[Measurement]:
    """Count outcomes in each group of configurations."""
    for name in dict.fromkeys(group(configuration) for configuration, *_ in tried):
        members = [(outcome, seconds) for configuration, outcome, _, seconds in tried if group(configuration) == name]
        outcomes = Counter(outcome for outcome, _ in members)
        seconds = sum(seconds for _, seconds in members) / len(members)
        counts = {"configurations": len(members)} | {key: outcomes[key] for key in ("fine", "clear errors", "failures")}
        for metric, count in counts.items():
            yield Measurement(dataset, name, metric, count, seconds, {"steps": NUM_STEPS})


def try_configuration(configuration: Configuration) -> tuple[str, str]:
    """Fit and predict once.

    :returns: ``"fine"``, ``"clear errors"`` or ``"failures"``, and the text of an error without numbers.
    """
    logging.getLogger("pyro").setLevel(logging.ERROR)
    with isolated(configuration.seed), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            values = _fit_and_predict(configuration)
        except Exception as error:  # every kind of error is an outcome
            return ("clear errors" if is_clear(error) else "failures"), _without_numbers(error)
    wrong = [name for name, value in values.items() if not value.isfinite().all()]
    if not wrong:
        return "fine", ""
    for warning in caught:
        if "overflow" in str(warning.message) or "not finite" in str(warning.message):
            return "clear errors", _without_numbers(warning.message)
    return "failures", f"not finite: {', '.join(wrong)}"


def is_clear(error: BaseException) -> bool:
    """Whether an error is of a documented class, and says what was expected and what was given.

    The second pattern is of scikit-learn's own checks, whose texts its test suite for estimators requires.
    """
    patterns = (r"\bexpected\b.*\b(got|but)\b", r"^Input X contains infinity|^Found array with .* while a minimum of")
    return isinstance(error, ValueError | TypeError) and any(re.search(each, str(error), re.DOTALL) for each in patterns)


def _without_numbers(error: object) -> str:
    """Class of an error and start of its text, with # for numbers and without Pyro's table of sites."""
    text = re.sub(r"-?\d[\d.e+-]*", "#", " ".join(str(error).split("Trace Shapes")[0].split()))
    return f"{type(error).__name__}: {text}"[:150].replace("|", "/")


def make_data(configuration: Configuration) -> tuple[Tensor, Tensor, int]:
    """Make inputs [N, 1], data [N, D], and a number of inducing points."""
    kind, dtype = configuration.kind, getattr(torch, configuration.dtype)
    N, D = (1 if kind == "one row" else 12), (1 if kind == "one column" else 3)
    support, _ = LIKELIHOODS[configuration.likelihood]
    y = torch.randn(N, D, dtype=torch.float64)
    if kind == "offset":
        y = y + 1e3
    if kind == "an outlier":
        y[0, 0] = 1e3
    if kind == "rows duplicated":
        y = y[:2].repeat(N // 2, 1)
    if kind == "columns duplicated":
        y = y[:, :1].repeat(1, D)
    Y = SUPPORTS[support](y, configuration.scale).to(dtype)
    if kind == "one column constant":
        Y[:, 0] = Y[0, 0]
    if kind == "all constant":
        Y[:] = Y[0, 0]
    if kind == "a column empty":
        Y[:, -1] = torch.nan
    if kind == "a row empty":
        Y[-1] = torch.nan
    if kind == "99 % missing":
        Y[torch.rand(N, D) < 0.99] = torch.nan
        Y[torch.arange(D), torch.arange(D)] = SUPPORTS[support](y, configuration.scale).to(dtype).diagonal()
    if kind == "an infinite entry":
        Y[0, 0] = torch.inf
    x = torch.linspace(0.0, 1.0, N, dtype=torch.float64)[:, None]
    if kind == "equal inputs":
        x = torch.zeros_like(x)
    if kind == "nearly equal inputs":
        x = 1.0 + 1e-9 * x
    return (configuration.input_scale * x).to(dtype), Y, (2 * N if kind == "inducing points > rows" else min(5, N))


def _fit_and_predict(configuration: Configuration) -> dict[str, Tensor]:
    """Return losses, parameters and predictions by name."""
    x, Y, num_inducing = make_data(configuration)
    likelihood = LIKELIHOODS[configuration.likelihood][1](Y, configuration.scale)
    if configuration.model == "GPLVM (scikit-learn)":
        return _use_estimator(configuration, Y, likelihood, num_inducing)
    if configuration.model == "LinearGPVAE":
        return _use_linear(configuration, x, Y)
    model = _make_model(configuration, x, Y, likelihood, num_inducing).to(Y.dtype)
    data = (x, Y) if isinstance(model, GPVAE | SparseGPVAE) else (Y,)
    if isinstance(model, BayesianGPLVM | RandomFeatureLVM):
        model.initialize(Y)
    guide = _make_guide(configuration, model, Y.shape[1]).to(Y.dtype)
    settings: dict[str, Any] = {"batch_size": 5} if configuration.mini_batches else {}
    bound = BOUNDS[configuration.bound]()
    history = fit(model, guide, *data, loss=bound, num_steps=NUM_STEPS, progress=False, **settings)
    parameters = [*model.parameters(), *guide.parameters()]
    values = {
        "losses": torch.tensor(history.losses, dtype=torch.float64),
        "parameters": torch.cat([p.detach().flatten() for p in parameters]),
    }
    prediction = _predict(configuration, model, guide, x, Y)
    return values | {"mean": prediction.mean, "variance": prediction.variance, "median": prediction.quantile(0.5)}


def _make_kernel(configuration: Configuration, input_dim: int, **options: Any) -> Any:
    return KERNELS[configuration.kernel](input_dim, lengthscale=configuration.lengthscale, **options)


def _make_model(configuration: Configuration, x: Tensor, Y: Tensor, likelihood: Any, num_inducing: int) -> Any:
    N, D = Y.shape
    if configuration.model == "BayesianGPLVM":
        kernel = _make_kernel(configuration, 2)
        return BayesianGPLVM(N, D, 2, kernel, num_inducing=num_inducing, likelihood=likelihood)
    if configuration.model == "RandomFeatureLVM":
        options: dict[str, Any] = {"lengthscale": configuration.lengthscale, "likelihood": likelihood}
        return RandomFeatureLVM(N, D, 2, num_frequencies=4, num_components=2, **options)
    kernel = _make_kernel(configuration, 1, batch_shape=(2,))
    decoder = nn.Linear(2, D) if configuration.seed % 2 else MLP(2, D, [4])
    if configuration.model == "GPVAE":
        return GPVAE(kernel, decoder, likelihood)
    points = torch.linspace(float(x.min()), float(x.max()), num_inducing, dtype=x.dtype)[:, None]
    return SparseGPVAE(kernel, decoder, points, likelihood)


def _make_guide(configuration: Configuration, model: Any, data_dim: int) -> Any:
    makers: dict[str, Callable[[], Any]] = {
        "mean field": lambda: MeanFieldGuide(model),
        "mean field, full": lambda: MeanFieldGuide(model, covariance={"X": "full"}),
        "mean field, encoder": lambda: MeanFieldGuide(model, encoders={"X": ZeroImputation(data_dim, 2, [4])}),
        "annealed": lambda: AutoAnnealedLangevin(model, num_steps=2),
        "annealed, local": lambda: AutoAnnealedLangevin(model, local_plate="data", num_steps=2),
        "random features": lambda: RandomFeatureGuide(model),
        "random features, explicit": lambda: RandomFeatureGuide(model, weights="explicit"),
        "structured, IndexNet": lambda: StructuredGPGuide(model, encoders={"f": IndexNet(data_dim, 2)}),
        "structured, FactorNet": lambda: StructuredGPGuide(model, encoders={"f": FactorNet(data_dim, 2, [4])}),
        "structured": lambda: StructuredGPGuide(model),
        "sparse structured, FactorNet": lambda: SparseStructuredGPGuide(model, encoders={"u": FactorNet(data_dim, 2, [4])}),
        "sparse structured": lambda: SparseStructuredGPGuide(model),
    }
    return makers[configuration.guide]()


def _predict(configuration: Configuration, model: Any, guide: Any, x: Tensor, Y: Tensor) -> Any:
    use = configuration.use
    options: dict[str, Any] = {"num_samples": 4}
    if isinstance(model, GPVAE | SparseGPVAE):
        x_new = x[:2] + (x.max() - x.min() + configuration.input_scale)
        if use == "impute":
            return model.impute(guide, x, Y, **options)
        if use == "predict":
            return model.predict(guide, x, Y, **options)
        return model.predict(guide, x, Y, x_new, joint=use.startswith("infer"), **options)
    if use == "predict":
        return model.predict(guide, torch.zeros(2, 2, dtype=Y.dtype), **options)
    if use == "impute":
        return model.impute(guide, Y, **options)
    if use == "infer_latents or forecast":
        method = "laplace" if configuration.seed % 2 else "variational"
        return model.predict(guide, model.infer_latents(guide, Y, method=method, num_steps=3), **options)
    return model.reconstruct(guide, Y, **options)


def _use_linear(configuration: Configuration, x: Tensor, Y: Tensor) -> dict[str, Tensor]:
    kernel = None if configuration.seed % 2 else _make_kernel(configuration, 1, batch_shape=(2,))
    model = LinearGPVAE(kernel, independent_dim=1)
    bounds = model.fit(x.double(), Y.double(), num_sweeps=NUM_STEPS)
    x_new = None if configuration.use in ("predict", "impute") else x.double()[:2] + configuration.input_scale
    prediction = model.predict(x_new, num_samples=4)
    return {"bounds": torch.as_tensor(bounds), "mean": prediction.mean, "variance": prediction.variance}


def _use_estimator(configuration: Configuration, Y: Tensor, likelihood: Any, num_inducing: int) -> dict[str, Tensor]:
    estimator = GPLVM(likelihood=likelihood, max_iter=NUM_STEPS, n_inducing=num_inducing, random_state=configuration.seed)
    latents = estimator.fit(Y.numpy()).transform(Y.numpy()[:3])
    mean = estimator.inverse_transform(latents)
    losses = torch.tensor(estimator.history_.losses, dtype=torch.float64)
    return {"losses": losses, "latents": torch.as_tensor(latents), "mean": torch.as_tensor(mean)}
