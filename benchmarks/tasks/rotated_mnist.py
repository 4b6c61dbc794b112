"""Rotated digits: images of unseen angles by GP-VAEs over style and angle, beside a VAE and a conditional VAE."""

import math
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pyro
import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn.functional import affine_grid, grid_sample
from tqdm import tqdm

from benchmarks.core.report import Measurement, Row, Settings
from benchmarks.peers.image_vae import SIDE, ImageDecoder, ImageEncoder, ImageVAE, train
from pyro_lvgp._utils.seeding import seeded
from pyro_lvgp.datasets import load_dataset
from pyro_lvgp.guides import SparseStructuredGPGuide, StructuredGPGuide
from pyro_lvgp.infer import JointAdam, LRSchedule, MeanFieldELBO, StructuredELBO, fit
from pyro_lvgp.kernels import Embedded, Linear, Periodic
from pyro_lvgp.likelihoods import Gaussian
from pyro_lvgp.models import GPVAE, SparseGPVAE

NUM_THREADS = 1
NUM_ANGLES, LATENT_DIM, EMBEDDING_DIM, NUM_INDUCING_ANGLES = 16, 16, 16, 8
NUM_STYLES, NUM_STEPS, STYLES_OF_BATCH, LEARNING_RATE = 100, 1000, 10, 3e-3
NOISE = 0.01  # initial variance; from 0.05 the GP-VAEs stay at the mean image for hundreds of steps
PUBLISHED: list[Row] = []
NOTES = f"""\
Data are {NUM_STYLES} images of the digit 3 (styles) of MNIST, each turned by {NUM_ANGLES} angles, with pixels from 0 to 1. One
image, of a random angle, of each of three quarters of the styles is unseen. The score is the mean squared error of the pixels
of unseen images, given all other images. Casale et al. (2018) and Jazbec et al. (2021) have 400 styles and train longer: the
budget here is smaller, and their figures cannot be compared with these. All models have the same networks (two convolutional
layers), {LATENT_DIM} latents, one noise variance, and equal steps of Adam on batches of {STYLES_OF_BATCH * NUM_ANGLES} images.
"mean of the style" and "neighbouring angles" are means of images, without a model. The VAE does not know angles: it decodes
the mean of the encodings of the two neighbouring angles of the style. The conditional VAE (CVAE) is given cosine and sine of
the angle in both networks, and decodes the mean encoding of the other images of the style at the unseen angle. The dense
GP-VAE has a periodic kernel of the angle, and styles are independent series. The sparse one has a product of a linear kernel
of learned style embeddings and a periodic kernel of the angle. The embeddings have {EMBEDDING_DIM} columns, initialised by
principal components of the seen images of a style, and one of ones. Inducing points are {EMBEDDING_DIM + 1} random styles at
{NUM_INDUCING_ANGLES} angles. These settings of the sparse form were chosen with the unseen images of seed 10."""


class Data(NamedTuple):
    """Rotated digits.

    :param images: all images.
    :param hidden: whether an image is unseen.
    """

    images: Float[Tensor, "S T D"]
    hidden: Bool[Tensor, "S T"]

    @property
    def angles(self) -> Float[Tensor, " T"]:
        return 2.0 * math.pi * torch.arange(NUM_ANGLES) / NUM_ANGLES

    @property
    def seen(self) -> Float[Tensor, "S T D"]:
        """Images with NaN where they are unseen."""
        return self.images.masked_fill(self.hidden[..., None], torch.nan)

    @property
    def mean_of_styles(self) -> Float[Tensor, "S D"]:
        return self.seen.nanmean(1)


def rotate(images: Float[Tensor, "S D"], angles: Float[Tensor, " T"]) -> Float[Tensor, "S T D"]:
    """Turn square images by angles, with bilinear interpolation and black corners."""
    cosine, sine, zero = angles.cos(), angles.sin(), torch.zeros_like(angles)
    turns = torch.stack([torch.stack([cosine, -sine, zero], -1), torch.stack([sine, cosine, zero], -1)], -2)
    grid = affine_grid(turns, [len(angles), 1, SIDE, SIDE], align_corners=False)
    each = [
        grid_sample(image.reshape(1, 1, SIDE, SIDE).expand(len(angles), -1, -1, -1), grid, align_corners=False)
        for image in images
    ]
    return torch.stack(each).flatten(2)


def make_data(num_styles: int, seed: int) -> Data:
    """Rotate random images of the digit 3, and hide one angle of three quarters of them."""
    digits = load_dataset("mnist")
    threes = torch.as_tensor(digits["X_train"][digits["y_train"] == 3], dtype=torch.float32).flatten(1)
    threes = threes / threes.max()
    generator = torch.Generator().manual_seed(seed)
    styles = threes[torch.randperm(len(threes), generator=generator)[:num_styles]]
    hidden = torch.zeros(num_styles, NUM_ANGLES, dtype=torch.bool)
    hidden[torch.arange(num_styles), torch.randint(NUM_ANGLES, (num_styles,), generator=generator)] = True
    hidden[3 * num_styles // 4 :] = False
    images = rotate(styles, 2.0 * math.pi * torch.arange(NUM_ANGLES) / NUM_ANGLES)
    return Data(images, hidden)


def of_style(data: Data, num_steps: int) -> Tensor:
    """Predict the mean of the seen images of each style."""
    return data.mean_of_styles[:, None].expand_as(data.images)


def of_neighbours(data: Data, num_steps: int) -> Tensor:
    """Predict the mean of the images of the two neighbouring angles, which are seen."""
    return 0.5 * (data.images.roll(1, 1) + data.images.roll(-1, 1))


def vae(data: Data, num_steps: int) -> Tensor:
    """Decode the mean of the encodings of the two neighbouring angles, which are seen."""
    model = ImageVAE(LATENT_DIM, variance=NOISE)
    train(model, data.images[~data.hidden], None, num_steps=num_steps, batch_size=160, lr=LEARNING_RATE)
    with torch.no_grad():
        latents, _ = model.encoder(data.images)
        return model.decode(0.5 * (latents.roll(1, 1) + latents.roll(-1, 1)), None)


def cvae(data: Data, num_steps: int) -> Tensor:
    """Decode the mean encoding of the seen images of a style at each angle."""
    angles = torch.stack([data.angles.cos(), data.angles.sin()], -1).expand(len(data.images), -1, -1)
    model = ImageVAE(LATENT_DIM, condition_dim=2, variance=NOISE)
    seen = ~data.hidden
    train(model, data.images[seen], angles[seen], num_steps=num_steps, batch_size=160, lr=LEARNING_RATE)
    with torch.no_grad():
        latents, _ = model.encoder(data.images, angles)
        mean = latents.masked_fill(data.hidden[..., None], torch.nan).nanmean(1, keepdim=True).expand_as(latents)
        return model.decode(mean, angles)


def dense(data: Data, num_steps: int) -> Tensor:
    """Predict by a GP-VAE with a process of the angle for each style."""
    x, y = data.angles[:, None], data.seen
    kernel = Periodic(1, 2.0 * math.pi, lengthscale=torch.linspace(0.5, 3.0, LATENT_DIM)[:, None], batch_shape=(LATENT_DIM,))
    kernel.period_unconstrained.requires_grad_(False)
    model = GPVAE(kernel, ImageDecoder(LATENT_DIM), Gaussian(NOISE), num_data=len(y))
    guide = StructuredGPGuide(model, encoders={"f": ImageEncoder(LATENT_DIM)}, num_eval_site_updates=0)
    fit_uncompiled(model, guide, x, y, StructuredELBO(max_plate_nesting=2), num_steps, STYLES_OF_BATCH)
    return model.predict(guide, x, y, num_samples=20, seed=0).mean


def components(data: Data, num: int) -> Float[Tensor, "S E"]:
    """Compute principal components of variance 1 of the styles, whose columns are the pixels of all angles.

    An unseen image counts as the mean of its angle.
    """
    centred = (data.seen - data.seen.nanmean(0)).nan_to_num(0.0).flatten(1)
    found = torch.linalg.svd(centred, full_matrices=False).U[:, :num] * len(centred) ** 0.5
    return torch.nn.functional.pad(found, (0, num - found.shape[1]))


def sparse(data: Data, num_steps: int) -> Tensor:
    """Predict by a sparse GP-VAE of style and angle."""
    num_styles = len(data.images)
    x = torch.cartesian_prod(torch.arange(float(num_styles)), data.angles)  # columns: style, angle
    y, seen = data.seen.flatten(0, 1), ~data.hidden.flatten()
    # A linear kernel has the rank of its embedding, so that few styles determine it: inducing points that are fewer than the
    # rank of the kernel at the data leave noise in the latents, which a fit reduces by ignoring styles.
    embedding = torch.cat([components(data, EMBEDDING_DIM), torch.ones(num_styles, 1)], -1) / (EMBEDDING_DIM + 1) ** 0.5
    styles = Embedded(Linear(EMBEDDING_DIM + 1), num_styles, embedding=embedding, active_dims=[0])
    angles = Periodic(
        1, 2.0 * math.pi, lengthscale=torch.linspace(0.5, 1.5, LATENT_DIM)[:, None], batch_shape=(LATENT_DIM,), active_dims=[1]
    )
    angles.period_unconstrained.requires_grad_(False)
    chosen = torch.randperm(num_styles)[: EMBEDDING_DIM + 1].to(x)
    points = torch.cartesian_prod(chosen, 2.0 * math.pi * torch.arange(NUM_INDUCING_ANGLES) / NUM_INDUCING_ANGLES)
    model = SparseGPVAE(styles * angles, ImageDecoder(LATENT_DIM), points, Gaussian(NOISE), num_data=int(seen.sum()))
    guide = SparseStructuredGPGuide(model, encoders={"u": ImageEncoder(LATENT_DIM)})
    fit_uncompiled(model, guide, x[seen], y[seen], MeanFieldELBO("points"), num_steps, STYLES_OF_BATCH * NUM_ANGLES)
    found = model.predict(guide, x[seen], y[seen], x[~seen], num_samples=20, seed=0).mean
    return torch.zeros_like(y).index_put((~seen,), found).unflatten(0, (num_styles, NUM_ANGLES))


def fit_uncompiled(
    model: GPVAE | SparseGPVAE, guide: StructuredGPGuide, x: Tensor, y: Tensor, loss: Any, num_steps: int, batch_size: int
) -> None:
    """Fit as the other models, step by step, since TorchScript does not trace gradients of convolutions."""
    fit(
        model,
        guide,
        x,
        y,
        loss=loss,
        optim=JointAdam(lr=LEARNING_RATE),
        num_steps=num_steps,
        batch_size=batch_size,
        callbacks=[LRSchedule("cosine")],
        compile=False,
        progress=False,
    )


METHODS: dict[str, Callable[[Data, int], Tensor]] = {
    "mean of the style": of_style,
    "neighbouring angles": of_neighbours,
    "VAE": vae,
    "CVAE": cvae,
    "GP-VAE, dense (pyro_lvgp)": dense,
    "GP-VAE, sparse (pyro_lvgp)": sparse,
}


def run(*, quick: bool, seeds: int) -> Iterator[Measurement]:
    """Measure all methods for each seed."""
    num_styles, num_steps = (12, 3) if quick else (NUM_STYLES, NUM_STEPS)
    settings: Settings = {"styles": num_styles, "steps": num_steps}
    for seed in tqdm(range(seeds), desc="rotated MNIST", unit="seed"):
        data = make_data(num_styles, seed)
        for name, predict in METHODS.items():
            start = time.perf_counter()
            with pyro.get_param_store().scope(), seeded(seed):
                found = predict(data, num_steps)
            error = (found - data.images)[data.hidden].square().mean().item()
            yield Measurement("rotated MNIST", name, "MSE of unseen images", error, time.perf_counter() - start, settings)
