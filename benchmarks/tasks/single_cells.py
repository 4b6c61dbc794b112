"""Counts of single cells: a Bayesian GPLVM with library sizes and batches beside a VAE with the settings of scVI."""

import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from matplotlib import pyplot as plt
from sklearn.cluster import KMeans
from sklearn.manifold import TSNE
from sklearn.metrics import adjusted_rand_score
from sklearn.neighbors import NearestNeighbors
from torch import Tensor
from torch.nn.functional import one_hot
from tqdm import tqdm

from benchmarks.core.isolated import isolated
from benchmarks.core.report import Measurement, Row, Settings
from benchmarks.peers.count_vae import fit_count_vae
from pyro_lvgp.datasets import single_cells
from pyro_lvgp.guides import MeanFieldGuide
from pyro_lvgp.infer import JointAdam, LRSchedule, MeanFieldELBO, fit
from pyro_lvgp.likelihoods import NegativeBinomial
from pyro_lvgp.models import BayesianGPLVM, RowArguments
from pyro_lvgp.networks import ZeroImputation
from pyro_lvgp.plots import plot_latents

NUM_THREADS = 1
LATENT_DIM, NUM_INDUCING, NUM_CELLS, NUM_STEPS, NUM_EPOCHS = 10, 30, 1000, 800, 400
NUM_DRAWS = 8  # of the latents, for predictive densities
PUBLISHED: list[Row] = []
NOTES = f"""\
Simulated counts of 200 genes in {NUM_CELLS} cells of six types from three batches (`pyro_lvgp.datasets.single_cells`). A
tenth of the entries is hidden from all methods. Library sizes are the sums of all counts of a cell; all methods but "without
row arguments" are given them, and the batches. Latents have {LATENT_DIM} dimensions.
The Bayesian GPLVM has {NUM_INDUCING} inducing points and a dispersion of each gene, and takes {NUM_STEPS} steps of Adam of 128
cells, with a learning rate of 0.02 that falls to zero. "encoder" amortises the latents by a network with a hidden layer of 128
that sees log(1 + y); the others have a Gaussian for each cell. The VAE has the published settings of scVI: a hidden layer of
128, batch normalisation, dropout, negative binomial counts, 400 epochs of mini-batches of 128 at a rate of 0.001.
"held-out" is the mean log density of the hidden entries, of a mixture over {NUM_DRAWS} draws; that of the true means is the
best that can be expected. "1-NN type" and "1-NN batch" are the shares of cells whose nearest neighbour among the latent means
has their type, or batch (chance is about 0.17 and 0.33); "ARI" compares six clusters of k-means with the types."""


class Cells(NamedTuple):
    """Counts with hidden entries, and what is known of each cell.

    :param Y: counts, NaN where hidden.
    :param hidden: mask of the hidden entries.
    :param truth: expected counts.
    """

    counts: Float[Tensor, "N D"]
    Y: Float[Tensor, "N D"]
    hidden: Tensor
    library: Float[Tensor, "N 1"]
    batch: Int[Tensor, " N"]
    kind: Int[Tensor, " N"]
    truth: Float[Tensor, "N D"]


class LogCounts(ZeroImputation):
    """Encoder of log(1 + y)."""

    def forward(self, y: Float[Tensor, "B D"]) -> Any:
        return super().forward(y.log1p())


def simulate(seed: int) -> Cells:
    """Simulate cells, and hide a tenth of their entries."""
    data = single_cells(NUM_CELLS, seed=seed)
    counts, truth = torch.tensor(data.Y).float(), torch.tensor(data["mean"]).float()
    hidden = torch.rand(counts.shape, generator=torch.Generator().manual_seed(seed)) < 0.1
    batch, kind = torch.tensor(data.batch), torch.tensor(data["type"])
    return Cells(counts, counts.masked_fill(hidden, torch.nan), hidden, counts.sum(1, keepdim=True), batch, kind, truth)


def run(*, quick: bool, seeds: int, picture: Path | None = None) -> Iterator[Measurement]:
    """Fit all methods to each table, and draw the latents of the first."""
    embeddings: dict[str, Tensor] = {}
    for seed in tqdm(range(seeds), desc="single_cells", unit="table"):
        yield from measure(
            seed, num_steps=5 if quick else NUM_STEPS, num_epochs=1 if quick else NUM_EPOCHS, latents=embeddings
        )
        if picture is not None and seed == 0:
            draw(embeddings, simulate(0), picture)


def measure(seed: int, *, num_steps: int, num_epochs: int, latents: dict[str, Tensor]) -> Iterator[Measurement]:
    """Simulate cells, fit all methods and score them; add their latent means to ``latents``."""
    with isolated(seed):
        cells = simulate(seed)
        results: list[tuple[str, float | Tensor, Tensor | None, float, Settings]] = []
        known = RowArguments(exposure=cells.library, covariates=one_hot(cells.batch).float())
        for name, rows, is_amortised in (
            ("GPLVM", known, False),
            ("GPLVM, encoder", known, True),
            ("GPLVM, without row arguments", None, False),
        ):
            results.append((name, *fitted_gplvm(cells, rows, is_amortised, num_steps, seed), {"steps": num_steps}))
        results.append(("VAE", *fitted_vae(cells, num_epochs), {"epochs": num_epochs}))
        r = torch.tensor(2.0)
        exact = torch.distributions.NegativeBinomial(r, logits=(cells.truth / r).log()).log_prob(cells.counts)
        results.append(("true means", exact[cells.hidden].mean(), None, 0.0, {}))
        seconds_of_vae = next(seconds for name, *_, seconds, _ in results if name == "VAE")
        for name, log_prob, X, seconds, settings in results:
            scores = {"held-out [nats per entry]": float(log_prob)}
            if X is not None:
                scores |= structure(X, cells) | {"time / VAE's": seconds / seconds_of_vae}
                latents.setdefault(name, X)
            for metric, value in scores.items():
                yield Measurement("simulated cells", name, metric, value, seconds, settings)


def structure(X: Float[Tensor, "N Q"], cells: Cells) -> dict[str, float]:
    """Score the types and the batches of neighbours and of clusters."""
    nearest = torch.as_tensor(NearestNeighbors(n_neighbors=1).fit(X).kneighbors(return_distance=False)[:, 0])
    num_types = int(cells.kind.max()) + 1
    clusters = KMeans(num_types, n_init=10, random_state=0).fit_predict(X)
    same = {"1-NN type": cells.kind, "1-NN batch": cells.batch}
    scores = {name: float((labels[nearest] == labels).double().mean()) for name, labels in same.items()}
    return {"ARI": float(adjusted_rand_score(cells.kind, clusters)), **scores}


def fitted_gplvm(
    cells: Cells, rows: RowArguments | None, is_amortised: bool, num_steps: int, seed: int
) -> tuple[Tensor, Tensor, float]:
    """Fit a Bayesian GPLVM; return the held-out log density, the latent means and the wall seconds of the fit."""
    start, D = time.perf_counter(), cells.Y.shape[1]
    likelihood = NegativeBinomial(data_dim=D)
    model = BayesianGPLVM.from_data(
        cells.Y, LATENT_DIM, num_inducing=NUM_INDUCING, likelihood=likelihood, rows=rows, seed=seed
    )
    encoders = {"X": LogCounts(D, LATENT_DIM, (128,))} if is_amortised else None
    guide = MeanFieldGuide(model, encoders=encoders)
    settings: Any = {"num_steps": num_steps, "batch_size": 128, "seed": seed, "progress": False}
    fit(
        model,
        guide,
        cells.Y,
        loss=MeanFieldELBO(max_plate_nesting=1),
        optim=JointAdam(lr=0.02),
        callbacks=[LRSchedule("cosine")],
        **settings,
    )
    seconds = time.perf_counter() - start
    log_prob = []
    for idx in torch.arange(len(cells.Y)).split(100):  # bounds the memory of quadrature
        y = model.reconstruct(guide, cells.Y[idx], idx, num_samples=NUM_DRAWS, seed=seed)
        log_prob.append(y.log_prob(cells.counts[idx])[cells.hidden[idx]].detach())
    return torch.cat(log_prob).mean(), guide.median(cells.Y)["X"].detach(), seconds


def fitted_vae(cells: Cells, num_epochs: int) -> tuple[Tensor, Tensor, float]:
    """Fit the VAE; return the same as for a GPLVM."""
    start, batch = time.perf_counter(), one_hot(cells.batch).float()
    model = fit_count_vae(cells.Y, cells.library, batch, num_epochs=num_epochs)
    seconds = time.perf_counter() - start
    with torch.no_grad():
        mean, stddev = model.encode(cells.Y)
        draws = [mean + stddev * torch.randn_like(mean) for _ in range(NUM_DRAWS)]
        log_prob = torch.stack([model.counts(z, cells.library, batch).log_prob(cells.counts) for z in draws])
    return (log_prob.logsumexp(0) - math.log(NUM_DRAWS))[cells.hidden].mean(), mean, seconds


def draw(embeddings: dict[str, Tensor], cells: Cells, path: Path) -> None:
    """Draw the latent means of the GPLVM and of the VAE, by t-SNE, coloured by type and by batch."""
    figure, axes = plt.subplots(2, 3, figsize=(9.0, 5.6), layout="constrained")
    for column, name in enumerate(("GPLVM", "GPLVM, without row arguments", "VAE")):
        points = TSNE(init="pca", random_state=0).fit_transform(embeddings[name].numpy())
        for ax, label, values in zip(axes[:, column], ("type", "batch"), (cells.kind, cells.batch), strict=True):
            names = [f"{label} {int(value) + 1}" for value in values]
            plot_latents(points, names, ax=ax)
            ax.set(title=name if label == "type" else None, xlabel="", ylabel="", xticks=[], yticks=[])
            if column < 2 and ax.get_legend() is not None:
                ax.get_legend().remove()
    figure.savefig(path, dpi=110)
    plt.close(figure)
