"""Healing digits: missing pixels and frames of rotating digits by a GP-VAE over time, beside a VAE and interpolation."""

import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import pyro
import torch
from jaxtyping import Bool, Float, Int
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score
from torch import Tensor
from tqdm import tqdm

from benchmarks.core.report import Measurement, Row, Settings
from benchmarks.peers.binary_vae import BinaryVAE
from benchmarks.peers.image_vae import train
from benchmarks.tasks.rotated_mnist import LEARNING_RATE, fit_uncompiled, rotate
from pyro_lvgp._utils.seeding import seeded
from pyro_lvgp.datasets import load_dataset
from pyro_lvgp.guides import StructuredGPGuide
from pyro_lvgp.infer import StructuredELBO
from pyro_lvgp.kernels import RationalQuadratic
from pyro_lvgp.likelihoods import Bernoulli
from pyro_lvgp.models import GPVAE
from pyro_lvgp.networks import MLP, ZeroImputation

NUM_THREADS = 1
NUM_PIXELS, NUM_FRAMES, NUM_HIDDEN_FRAMES = 28**2, 10, 3
STEP_OF_ANGLE = 0.35  # standard deviation of the turn between frames, in radians
NUM_TRAINED, NUM_TESTED, NUM_STEPS = 1000, 200, 2400
LATENT_DIM, HIDDEN_DIMS, INIT_SCALE, NUM_DRAWS = 32, (256, 256), 0.1, 20
SHORTEST, LONGEST = 1.0, 5.0  # initial lengthscales in frames
SEQUENCES_OF_BATCH = 8
WARM_UP = {0.1: 0.4, 1.0: 0.6}  # weights of the divergence in the bound of the VAE, and shares of its steps
PUBLISHED: list[Row] = []
NOTES = f"""\
Data are sequences of {NUM_FRAMES} frames of a digit of MNIST that turns between frames by a normal angle with a standard
deviation of {STEP_OF_ANGLE} radians; pixels are black or white. {NUM_TRAINED} sequences of the training set, with missing
pixels, are for the fit, and {NUM_TESTED} of the test set for the scores. The task is that of Fortuin et al. (2020), who
have 60,000 sequences, train longer, and have turns and missing pixels of their own: their figures cannot be compared
with these. In "at_random" 60 % of the pixels are missing, in "not_at_random" 80 % of the white and 40 % of the black
ones, in "frames" all pixels of {NUM_HIDDEN_FRAMES} frames. NLL (nats) and MSE are means over missing pixels. AUROC is the mean
over digits of the area under the curve of a logistic regression on rounded, imputed sequences, fitted to half of the
test sequences and scored on the others. VAE and GP-VAE have the same networks (an encoder of seen pixels and their mask,
and a decoder, two hidden layers each), {LATENT_DIM} latents, a Bernoulli likelihood of the seen pixels, and equal steps on
batches of {SEQUENCES_OF_BATCH * NUM_FRAMES} frames. The GP-VAE starts from the networks of a VAE of half of these steps, and
has rational quadratic kernels over time. A site update is a step of natural gradients on the bound of each test sequence,
given its seen pixels; the VAE has none. Settings were chosen with seed 10."""

Mask = Bool[Tensor, "S T D"]


class Data(NamedTuple):
    """Sequences of binary images of a turning digit.

    :param images: all pixels, 0 or 1.
    :param hidden: whether a pixel is missing.
    :param labels: digits.
    :param num_trained: number of sequences for the fit, which come first; the others are scored.
    """

    images: Float[Tensor, "S T D"]
    hidden: Mask
    labels: Int[Tensor, " S"]
    num_trained: int

    @property
    def seen(self) -> Float[Tensor, "S T D"]:
        """Images with NaN for missing pixels."""
        return self.images.masked_fill(self.hidden, torch.nan)

    @property
    def trained(self) -> Float[Tensor, "S T D"]:
        return self.seen[: self.num_trained]

    @property
    def tested(self) -> Float[Tensor, "S T D"]:
        return self.seen[self.num_trained :]


def at_random(images: Float[Tensor, "S T D"], generator: torch.Generator) -> Mask:
    """Hide 60 % of the pixels."""
    return torch.rand(images.shape, generator=generator) < 0.6


def not_at_random(images: Float[Tensor, "S T D"], generator: torch.Generator) -> Mask:
    """Hide 80 % of the white pixels and 40 % of the black ones."""
    return torch.rand(images.shape, generator=generator) < torch.where(images > 0.5, 0.8, 0.4)


def frames(images: Float[Tensor, "S T D"], generator: torch.Generator) -> Mask:
    """Hide all pixels of three of the inner frames of each sequence."""
    order = torch.rand(len(images), NUM_FRAMES - 2, generator=generator).argsort(-1)
    hidden = torch.zeros(images.shape[:2], dtype=torch.bool)
    hidden[:, 1:-1] = order < NUM_HIDDEN_FRAMES
    return hidden[..., None].expand_as(images)


def make_data(hide: Callable[[Tensor, torch.Generator], Mask], num_trained: int, num_tested: int, seed: int) -> Data:
    """Turn random digits by a random walk of the angle, make pixels binary, and hide some of them."""
    digits, generator = load_dataset("mnist"), torch.Generator().manual_seed(seed)
    parts, labels = [], []
    for part, size in (("train", num_trained), ("test", num_tested)):
        X, y = (torch.as_tensor(digits[f"{name}_{part}"]) for name in "Xy")
        rows = torch.randperm(len(X), generator=generator)[:size]
        parts.append(X[rows].float().flatten(1))
        labels.append(y[rows].long())
    first = torch.cat(parts) / parts[0].max()
    angles = (STEP_OF_ANGLE * torch.randn(len(first), NUM_FRAMES, generator=generator)).cumsum(-1)
    turned = torch.cat([rotate(image[None], walk) for image, walk in zip(first, angles, strict=True)])
    images = (turned > 0.5).float()
    return Data(images, hide(images, generator), torch.cat(labels), num_trained)


def mean_of_pixels(data: Data, num_steps: int) -> Tensor:
    """Predict the mean of each pixel over the training images in which it is seen, and over one white and one black image."""
    rows = data.trained.flatten(0, 1)
    return ((rows.nansum(0) + 1.0) / ((~rows.isnan()).sum(0) + 2.0)).expand(data.tested.shape)


def last_seen(data: Data, num_steps: int) -> Tensor:
    """Predict the last seen value of each pixel, the next one before the first; the mean of the pixel where there is none."""
    past, future = carried(data.tested), carried(data.tested.flip(1)).flip(1)
    filled = torch.where(past.isnan(), future, past)
    return torch.where(filled.isnan(), mean_of_pixels(data, num_steps), filled)


def interpolated(data: Data, num_steps: int) -> Tensor:
    """Interpolate each pixel linearly in time; the mean of the pixel where it is never seen."""
    filled = in_time(data.tested)
    return torch.where(filled.isnan(), mean_of_pixels(data, num_steps), filled)


def carried(values: Float[Tensor, "S T D"]) -> Float[Tensor, "S T D"]:
    """Replace each missing value by the last one before it; it stays NaN where there is none."""
    filled = values.clone()
    for later in range(1, NUM_FRAMES):
        filled[:, later] = torch.where(filled[:, later].isnan(), filled[:, later - 1], filled[:, later])
    return filled


def in_time(values: Float[Tensor, "S T D"]) -> Float[Tensor, "S T D"]:
    """Interpolate missing values linearly in time; those at the ends are equal to the nearest one."""
    time = torch.arange(float(NUM_FRAMES))[:, None].expand_as(values)
    of_seen = time.masked_fill(values.isnan(), torch.nan)
    (past, start), (future, end) = (
        (carried(values), carried(of_seen)),
        (carried(values.flip(1)).flip(1), carried(of_seen.flip(1)).flip(1)),
    )
    between = past + (future - past) * (time - start) / (end - start).clamp_min(1.0)
    return torch.where(past.isnan(), future, torch.where(future.isnan(), past, between))


def vae(data: Data, num_steps: int) -> Tensor:
    """Decode encodings of single frames; those of missing frames are interpolated linearly in time."""
    model = vae_of_frames(data, num_steps)
    with torch.no_grad():
        hidden = data.tested.isnan().all(-1, keepdim=True)
        loc, scale = (in_time(part.masked_fill(hidden, torch.nan)) for part in model.encoder(data.tested))
        draws = [model.decoder(loc + scale * torch.randn_like(loc)).sigmoid() for _ in range(NUM_DRAWS)]
        return torch.stack(draws).mean(0)


def vae_of_frames(data: Data, num_steps: int) -> BinaryVAE:
    """Train a VAE on the single frames of which pixels are seen.

    Its encoder takes seen pixels and their mask, and it has two hidden layers, as has the decoder.
    """
    encoder = ZeroImputation(NUM_PIXELS, LATENT_DIM, HIDDEN_DIMS, init_scale=INIT_SCALE)
    decoder = MLP(LATENT_DIM, NUM_PIXELS, HIDDEN_DIMS)
    list(decoder.parameters())[-1].data = mean_of_pixels(data, 0)[0, 0].logit()  # the bias of the last layer
    model = BinaryVAE(encoder, decoder)
    rows = data.trained.flatten(0, 1)
    rows = rows[~rows.isnan().all(-1)]
    for kl_weight, share in WARM_UP.items():
        model.kl_weight, steps = kl_weight, max(round(share * num_steps), 1)
        train(model, rows, None, num_steps=steps, batch_size=SEQUENCES_OF_BATCH * NUM_FRAMES, lr=LEARNING_RATE)
    return model


def gp_vae(data: Data, num_steps: int) -> Iterator[tuple[str, Tensor]]:
    """Decode processes over time, given the seen pixels of all frames, without and with an update of the sites.

    Encoder and decoder are trained as those of the VAE for half of the steps.
    """
    of_frames = vae_of_frames(data, num_steps // 2)
    lengthscale = torch.linspace(SHORTEST, LONGEST, LATENT_DIM)[:, None]
    kernel = RationalQuadratic(1, lengthscale=lengthscale, batch_shape=(LATENT_DIM,))
    model = GPVAE(kernel, of_frames.decoder, Bernoulli(), num_data=data.num_trained)
    guide = StructuredGPGuide(model, encoders={"f": of_frames.encoder}, num_eval_site_updates=0)
    x, loss = torch.arange(float(NUM_FRAMES))[:, None], StructuredELBO(max_plate_nesting=2)
    fit_uncompiled(model, guide, x, data.trained, loss, num_steps - num_steps // 2, SEQUENCES_OF_BATCH)
    for num_updates, name in enumerate(GP_VAES):
        guide.num_eval_site_updates = num_updates
        yield name, model.predict(guide, x, data.tested, num_samples=NUM_DRAWS, seed=0).mean


BASELINES: dict[str, Callable[[Data, int], Tensor]] = {
    "mean of the pixel": mean_of_pixels,
    "last seen value": last_seen,
    "linear interpolation": interpolated,
    "VAE": vae,
}
GP_VAES = ("GP-VAE (pyro_lvgp)", "GP-VAE, one site update (pyro_lvgp)")
PROBABILISTIC = ("mean of the pixel", "VAE", *GP_VAES)


def predictions(data: Data, num_steps: int, seed: int) -> Iterator[tuple[str, Tensor, float]]:
    """Predict by each method: its name, the probabilities of white pixels, and seconds of the fit and the prediction."""
    for name, predict in BASELINES.items():
        start = time.perf_counter()
        with seeded(seed):
            found = predict(data, num_steps)
        yield name, found, time.perf_counter() - start
    start = time.perf_counter()
    with pyro.get_param_store().scope(), seeded(seed):
        results = [(name, found, time.perf_counter() - start) for name, found in gp_vae(data, num_steps)]
    yield from results


def scores_of_pixels(data: Data, probability: Float[Tensor, "S T D"]) -> dict[str, float]:
    """Score probabilities of white pixels on the missing pixels of the test sequences.

    In the negative log likelihood (NLL) they are at least 1e-6, and at most 1 - 1e-6.
    """
    hidden = data.hidden[data.num_trained :]
    truth, found = data.images[data.num_trained :][hidden], probability[hidden]
    likely = found.clamp(1e-6, 1.0 - 1e-6)
    return {
        "NLL": -torch.where(truth > 0.5, likely, 1.0 - likely).log().mean().item(),
        "MSE": (found - truth).square().mean().item(),
    }


def area_under_curve(data: Data, probability: Float[Tensor, "S T D"]) -> float:
    """Mean over digits of the area under the ROC curve of a logistic regression on rounded, imputed test sequences.

    It is fitted to the first half of the sequences, and scored on the other one.
    """
    filled = torch.where(data.hidden[data.num_trained :], probability, data.images[data.num_trained :])
    rows, labels = filled.round().flatten(1).numpy(), data.labels[data.num_trained :].numpy()
    half = len(rows) // 2
    classifier = LogisticRegression(max_iter=200).fit(rows[:half], labels[:half])
    probabilities = classifier.predict_proba(rows[half:])
    areas = [
        roc_auc_score(labels[half:] == digit, column)
        for digit, column in zip(classifier.classes_, probabilities.T, strict=True)
        if digit in labels[half:]
    ]
    return float(np.mean(areas))


TASKS: dict[str, Callable[[Tensor, torch.Generator], Mask]] = {
    "at_random": at_random,
    "not_at_random": not_at_random,
    "frames": frames,
}


def sizes(quick: bool) -> tuple[int, int, int]:
    """Numbers of training sequences, of test sequences, and of steps."""
    return (24, 40, 3) if quick else (NUM_TRAINED, NUM_TESTED, NUM_STEPS)


def run(*, quick: bool, seeds: int, only: str | None = None) -> Iterator[Measurement]:
    """Measure all methods on all tasks, or on one, for each seed."""
    num_trained, num_tested, num_steps = sizes(quick)
    settings: Settings = {"sequences": num_trained, "steps": num_steps}
    for task in [only] if only else list(TASKS):
        for seed in tqdm(range(seeds), desc=task, unit="seed"):
            data = make_data(TASKS[task], num_trained, num_tested, seed)
            for name, found, seconds in predictions(data, num_steps, seed):
                values = scores_of_pixels(data, found) | {"AUROC": area_under_curve(data, found)}
                for metric, value in values.items():
                    if metric != "NLL" or name in PROBABILISTIC:
                        yield Measurement(f"healing MNIST, {task}", name, metric, value, seconds, settings)
