"""Figure of healing digits: `python -m benchmarks.tasks.healing_mnist_pictures [--quick] [--out FOLDER]`."""

import torch
from matplotlib.figure import Figure

from benchmarks.core.pictures import write_pictures
from benchmarks.tasks import healing_mnist
from pyro_lvgp.plots import plot_reconstructions

SEED, TASK = 0, "at_random"
NAMES = {
    "linear interpolation": "interpolation",
    "VAE": "VAE",
    "GP-VAE, one site update (pyro_lvgp)": "GP-VAE",
}


def draw(quick: bool) -> dict[str, Figure]:
    """Plot the first test sequence: original, seen, and imputed by each method."""
    num_trained, num_tested, num_steps = healing_mnist.sizes(quick)
    data = healing_mnist.make_data(healing_mnist.TASKS[TASK], num_trained, num_tested, SEED)
    original, seen = data.images[num_trained], data.tested[0]
    imputed = {
        NAMES[name]: torch.where(seen.isnan(), found[0], seen)
        for name, found, _ in healing_mnist.predictions(data, num_steps, SEED)
        if name in NAMES
    }
    return {TASK: plot_reconstructions(original, imputed, (28, 28), Y_masked=seen)}


if __name__ == "__main__":
    write_pictures("healing_mnist", draw, num_threads=healing_mnist.NUM_THREADS)
