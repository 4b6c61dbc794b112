"""Effective sample size and tail shape of known weights."""

import pytest
import torch

from pyro_lvgp.diagnostics import effective_sample_size, log_weights, pareto_k
from pyro_lvgp.guides import SparseStructuredGPGuide, StructuredGPGuide
from pyro_lvgp.kernels import RBF
from pyro_lvgp.models import GPVAE, SparseGPVAE
from pyro_lvgp.networks import MLP, IndexNet

pytestmark = pytest.mark.usefixtures("float64")


def test_effective_sample_size_of_known_weights():
    assert torch.allclose(
        effective_sample_size(torch.tensor([[1.0, 0.0], [1.0, 0.0], [1.0, -torch.inf]])), torch.tensor([3.0, 2.0])
    )
    far = torch.full((100,), -1e7, dtype=torch.float32)
    assert torch.allclose(effective_sample_size(far), torch.tensor(100.0, dtype=torch.float32))


def test_pareto_k_without_a_tail():
    log_weights = torch.randn(200, 6)
    expected = pareto_k(log_weights)[0]
    log_weights[:, 1] = 2.0  # all equal
    log_weights[:, 2] *= 1000.0  # one weight beside which all others vanish
    log_weights[5, 3] = torch.nan
    log_weights[:, 4] = (torch.arange(200) >= 180).float()  # two values, the larger one within the tail
    log_weights[:30, 5] = -torch.inf
    found = pareto_k(log_weights)
    torch.testing.assert_close(found[0], expected)
    assert found[1] == -torch.inf
    assert found[2] == torch.inf
    assert torch.isnan(found[3])
    assert found[4] == -torch.inf
    assert torch.isfinite(found[5])
    many = (torch.arange(1600) >= 1490).float()  # as many above the threshold as make the estimate divide by zero
    assert pareto_k(many) == -torch.inf


def test_pareto_k_finds_the_shape_of_the_tail():
    """Weights with tail index 1/k: w = v^-k for uniform v."""
    uniform = torch.rand(20_000, 1)
    k = torch.tensor([0.2, 0.5, 1.0])
    assert torch.allclose(pareto_k(-k * uniform.log()), k, atol=0.12)
    with pytest.raises(ValueError, match="25 draws or more to fit a tail, got 10"):
        pareto_k(torch.zeros(10))


@pytest.mark.parametrize("is_sparse", [False, True])
def test_one_series_has_joint_weights_and_several_have_their_own(is_sparse):
    t = torch.linspace(0.0, 1.0, 12)[:, None]
    Guide, site = (SparseStructuredGPGuide, "u") if is_sparse else (StructuredGPGuide, "f")
    for series, shape in (((), (5,)), ((4,), (5, 4))):
        model = SparseGPVAE(RBF(1), MLP(1, 3, [4]), t[::3].clone()) if is_sparse else GPVAE(RBF(1), MLP(1, 3, [4]))
        guide = Guide(model, encoders={site: IndexNet(3, 1)})
        assert log_weights(model, guide, t, torch.randn(*series, 12, 3), num_samples=5).shape == shape


def test_weights_that_differ_by_rounding_have_no_tail(dtype):
    generator = torch.Generator().manual_seed(0)
    terms = 50.0 * torch.rand(400, 3, generator=generator, dtype=dtype)
    log_w = (terms + 7.0) - terms - 7.0
    assert log_w.std() > 0.0
    assert (pareto_k(log_w) == -torch.inf).all()
    small = 1e-3 * torch.randn(400, 3, generator=generator, dtype=dtype)
    assert pareto_k(small).isfinite().all()
