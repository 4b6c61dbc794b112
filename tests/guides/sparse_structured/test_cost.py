"""Memory as a function of the number of points."""

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from pyro_lvgp.guides import SparseStructuredGPGuide
from pyro_lvgp.infer import MeanFieldELBO
from pyro_lvgp.kernels import RBF
from pyro_lvgp.models import SparseGPVAE
from pyro_lvgp.networks import IndexNet
from tests.helpers.sparse_processes import encoded, told_to_points

pytestmark = pytest.mark.usefixtures("float64")


class _Largest(TorchDispatchMode):
    """Size of the largest tensor made."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for part in result if isinstance(result, tuple | list) else (result,):
            if torch.is_tensor(part) and part.untyped_storage().nbytes():  # an expanded view takes no memory
                self.numel = max(self.numel, part.untyped_storage().nbytes() // 8)
        return result


@encoded
def test_memory_is_linear_in_the_points(form):
    """A training step, a prediction, a conditioning: no tensor beyond N times a small number."""
    num_data, num_inducing, width = 50_000, 6, 8
    x, y = torch.rand(num_data, 1), torch.randn(num_data, 1)
    net = IndexNet(1, 1, (width,), feature_dim=width)
    net = told_to_points(form, net, 1, num_nearest=2, hidden_dims=(width,))
    model = SparseGPVAE(RBF(1, lengthscale=0.2, batch_shape=(1,)), nn.Linear(1, 1), torch.rand(num_inducing, 1))
    guide = SparseStructuredGPGuide(model, encoders={"u": net}, num_eval_site_updates=1)
    with _Largest() as largest:
        MeanFieldELBO("points", 1, max_plate_nesting=1).loss_and_grads(model, guide, x, y)
        model.predict(guide, x, y, x, num_samples=2)
        guide.condition(x, y)
    assert num_data * num_inducing <= largest.numel <= num_data * 2 * width
