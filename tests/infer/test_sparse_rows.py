import pyro
import pytest
import torch
from pyro import poutine
from pyro.infer import TraceMeanField_ELBO
from torch.utils._python_dispatch import TorchDispatchMode

from pyro_lvgp import fit
from pyro_lvgp.guides import AutoAnnealedLangevin, MeanFieldGuide, StructuredGPGuide
from pyro_lvgp.infer import Checkpoint, JointAdam, LazyAdam, MeanFieldELBO, SparseRows
from pyro_lvgp.infer._svi import CheckedSVI
from pyro_lvgp.kernels import RBF
from pyro_lvgp.models import GPVAE, BayesianGPLVM

N, D, Q = 40, 4, 2


def gplvm(num=N, **options):
    model = BayesianGPLVM(num, D, Q, num_inducing=6, **options)
    return model.initialize(data(num))


def data(num=N):
    generator = torch.Generator().manual_seed(0)
    return torch.sin(torch.linspace(0.0, 6.0, num)[:, None] + torch.arange(D)) + 0.1 * torch.randn(num, D, generator=generator)


def mean_field():
    model = gplvm()
    return model, MeanFieldGuide(model)


def full_covariances():
    model = gplvm()
    return model, MeanFieldGuide(model, covariance={"X": "full"})


def annealed():
    model = gplvm()
    return model, AutoAnnealedLangevin(model, num_steps=2)


def own_model():
    def model(y, idx):
        scale = pyro.param("noise", torch.tensor(1.0), constraint=pyro.distributions.constraints.positive)
        with pyro.plate("data", N, subsample=idx, dim=-1):
            x = pyro.sample("x", pyro.distributions.Normal(0.0, 1.0))
            pyro.sample("y", pyro.distributions.Normal(x[:, None].expand(-1, D), scale).to_event(1), obs=y)

    def guide(y, idx):
        with pyro.plate("data", N, subsample=idx, dim=-1):
            loc = pyro.param("loc", torch.zeros(N), event_dim=0)
            scale = pyro.param("scale", torch.ones(N), constraint=pyro.distributions.constraints.positive, event_dim=0)
            pyro.sample("x", pyro.distributions.Normal(loc, scale))

    return model, guide


def loss_and_gradients(model, guide, *args):
    pyro.set_rng_seed(1)
    with poutine.trace(param_only=True) as capture:
        loss = TraceMeanField_ELBO().loss_and_grads(model, guide, *args)
    found = {}
    for name, site in capture.trace.nodes.items():
        tensor = site["value"].unconstrained()
        found[name], tensor.grad = tensor.grad, None
    return loss, found


@pytest.mark.parametrize("make", [mean_field, full_covariances, annealed, own_model])
def test_gradients_are_those_of_all_rows(float64, make):
    model, guide = make()
    idx = torch.tensor([3, 17, 30, 5])
    batch = data()[idx], idx
    guide(*batch)  # makes the parameters
    loss, dense = loss_and_gradients(model, guide, *batch)
    with SparseRows():
        same_loss, found = loss_and_gradients(model, guide, *batch)
    assert same_loss == pytest.approx(loss, rel=1e-12)
    assert dense.keys() == found.keys()
    of_rows = [name for name, gradient in found.items() if gradient is not None and gradient.is_sparse]
    assert len(of_rows) == 2
    for name, gradient in dense.items():
        if name in of_rows:
            assert sorted(set(found[name].coalesce().indices()[0].tolist())) == sorted(idx.tolist())
            torch.testing.assert_close(found[name].to_dense(), gradient)
        elif gradient is not None:
            torch.testing.assert_close(found[name], gradient)


def test_series_of_a_plate(float64):
    t = torch.linspace(0.0, 1.0, 12)[:, None].expand(6, -1, -1)
    y, idx = torch.randn(6, 12, D), torch.tensor([4, 1])
    model = GPVAE(RBF(1, lengthscale=0.2, batch_shape=(Q,)), torch.nn.Linear(Q, D), num_data=6)
    guide = StructuredGPGuide(model)
    guide(t, y)
    batch = t[idx], y[idx], idx
    loss, dense = loss_and_gradients(model, guide, *batch)
    with SparseRows():
        same_loss, found = loss_and_gradients(model, guide, *batch)
    assert same_loss == pytest.approx(loss, rel=1e-12)
    of_series = [name for name, gradient in found.items() if gradient.is_sparse]
    assert len(of_series) == 2
    for name in of_series:
        torch.testing.assert_close(found[name].to_dense(), dense[name])


class _LargestResult(TorchDispatchMode):
    """Number of entries of the largest tensor that an operation makes."""

    size = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func._schema.name.endswith("_") or func.is_view or not isinstance(result, torch.Tensor) or result.is_sparse:
            return result
        self.size = max(self.size, result.numel())
        return result


@pytest.mark.parametrize("make_guide", [MeanFieldGuide, lambda model: AutoAnnealedLangevin(model, num_steps=2)])
def test_a_step_makes_no_tensor_of_all_rows(make_guide):
    num = 20_000
    Y, model = data(num), gplvm(num)
    guide, idx = make_guide(model), torch.arange(10)
    sizes = {}
    for optim in (LazyAdam(), JointAdam()):
        svi = CheckedSVI(model, guide, optim, TraceMeanField_ELBO())
        for _ in range(2):
            svi.step(Y[idx], idx)
        with _LargestResult() as largest:
            svi.step(Y[idx], idx)
        sizes[type(optim)] = largest.size
    assert sizes[LazyAdam] < 2000
    assert sizes[JointAdam] >= num * Q


def test_only_rows_of_the_batch_move():
    Y, (model, guide) = data(), mean_field()
    idx = torch.tensor([3, 17])
    svi = CheckedSVI(model, guide, LazyAdam(), TraceMeanField_ELBO())
    svi.step(Y[idx], idx)
    before = guide.locs.X.clone()
    other = torch.tensor([17, 20])
    svi.step(Y[other], other)
    assert (before != guide.locs.X).any(1).nonzero().squeeze(1).tolist() == [17, 20]


def test_fits_reach_the_bound_of_adam():
    Y, bounds = data(), {}
    for optim in (LazyAdam(lr=0.02), JointAdam(lr=0.02)):
        pyro.clear_param_store()
        model, guide = mean_field()
        how = {"compile": False if isinstance(optim, LazyAdam) else "torchscript", "progress": False}
        fit(model, guide, Y, loss=MeanFieldELBO(), optim=optim, batch_size=10, num_steps=400, **how)
        bounds[type(optim)] = -MeanFieldELBO(num_samples=50).loss(model, guide, Y) / N
    assert bounds[LazyAdam] > bounds[JointAdam] - 0.1


def test_a_fit_continues_from_its_checkpoint(tmp_path):
    results = []
    for parts in ((4, 8), (8,)):
        pyro.clear_param_store()
        pyro.set_rng_seed(0)
        model, guide = mean_field()
        options = {"batch_size": 10, "callbacks": [Checkpoint(tmp_path / f"{len(parts)}.pt")], "progress": False}
        for num_steps in parts:
            fit(model, guide, data(), optim=LazyAdam(), num_steps=num_steps, **options)
        results.append(guide.locs.X)
    assert torch.equal(*results)


@pytest.mark.parametrize("compile", [True, "torchscript"])
def test_graphs_are_refused(compile):
    model, guide = mean_field()
    with pytest.raises(ValueError, match="with a LazyAdam"):
        fit(model, guide, data(), optim=LazyAdam(), batch_size=10, num_steps=2, compile=compile)
