"""Alignment of the latents of several fits."""

import json

import arviz_stats
import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.infer.autoguide import AutoNormal
from pyro.nn import PyroSample
from scipy.stats import ortho_group

from pyro_lvgp.diagnostics import chains_to_arviz
from pyro_lvgp.diagnostics._alignment import closest_transformation
from pyro_lvgp.guides import MeanFieldGuide, RandomFeatureGuide, StructuredGPGuide
from pyro_lvgp.infer import MeanFieldELBO, fit_restarts
from pyro_lvgp.kernels import (
    RBF,
    Categorical,
    Cosine,
    Embedded,
    Index,
    Linear,
    Matern,
    Periodic,
    RationalQuadratic,
    SpectralMixture,
    Stack,
)
from pyro_lvgp.kernels._symmetry import symmetry_of_processes
from pyro_lvgp.models import GPVAE, BayesianGPLVM, RandomFeatureLVM, RowArguments, SparseGPVAE
from pyro_lvgp.networks import MLP, IndexNet

N, D, Q = 12, 4, 3
Y = torch.randn(N, D, generator=torch.Generator().manual_seed(0))
T = torch.linspace(0.0, 1.0, N)[:, None]
LENGTHSCALES = torch.tensor([0.7, 1.3, 2.1])


def rotation():
    return torch.as_tensor(ortho_group.rvs(Q, random_state=1), dtype=torch.float64)


def signed_permutation():
    return torch.tensor([[0.0, 0.0, -1.0], [1.0, 0.0, 0.0], [0.0, -1.0, 0.0]], dtype=torch.float64)


def signs():
    return torch.diag(torch.tensor([-1.0, 1.0, -1.0], dtype=torch.float64))


def gplvm(kernel, **options):
    return BayesianGPLVM(N, D, Q, kernel, num_inducing=5, **options).double()


def frozen(kernel):
    """A kernel that is not learned."""
    return kernel.requires_grad_(False)


def log_joint(model, *args, **sites):
    """Log density of all sites at given values."""
    return poutine.trace(poutine.condition(model, sites)).get_trace(*args).log_prob_sum().detach()


def of_kernels():
    """Kernels with the group of their symmetry, and a matrix of the group."""
    return {
        "isotropic": (lambda: RBF(Q, lengthscale=1.3, ard=False), "rotations", rotation()),
        "sum": (lambda: 2.0 * Matern(Q, ard=False) + Linear(Q, ard=False) + 0.1, "rotations", rotation()),
        "ard": (lambda: RBF(Q, lengthscale=LENGTHSCALES), "signed permutations", signed_permutation()),
        "linear": (lambda: Linear(Q, variance=LENGTHSCALES), "signed permutations", signed_permutation()),
        "periodic": (
            lambda: Periodic(Q, period=LENGTHSCALES, lengthscale=LENGTHSCALES.flip(0)) * RBF(Q, ard=False),
            "signed permutations",
            signed_permutation(),
        ),
        "rational quadratic": (
            lambda: RationalQuadratic(Q, lengthscale=LENGTHSCALES),
            "signed permutations",
            signed_permutation(),
        ),
        "cosine": (lambda: Cosine(Q, period=5.0, ard=False), "signed permutations", signed_permutation()),
    }


def permute_kernel(kernel, names, matrix):
    """Permute parameters of a kernel as the latents, by the names of their sites."""
    for name in names:
        *path, parameter = name.split(".")[1:]
        owner = kernel.get_submodule(".".join(path))
        setattr(owner, parameter, getattr(owner, parameter).detach() @ matrix.abs())


@pytest.mark.parametrize("name", of_kernels())
def test_a_gplvm_is_the_same_after_a_transformation_of_its_group(name):
    make, group, matrix = of_kernels()[name]
    torch.manual_seed(0)
    model = gplvm(make())
    X, u, Z = (torch.randn(*shape, dtype=torch.float64) for shape in ((N, Q), (D, 5), (5, Q)))
    model.inducing_points = Z
    symmetry = model.latent_symmetry()
    assert symmetry.group == group
    before = log_joint(model, Y.double(), X=X, u=u)
    model.inducing_points = Z @ matrix
    permute_kernel(model.kernel, symmetry.scales, matrix)
    torch.testing.assert_close(log_joint(model, Y.double(), X=X @ matrix, u=u), before, rtol=1e-6, atol=1e-6)
    if group == "signed permutations":  # and no rotation is a symmetry
        turned = rotation()
        model.inducing_points = Z @ turned
        assert abs(log_joint(model, Y.double(), X=X @ turned, u=u) - before) > 1e-2


def test_what_is_fixed_is_no_symmetry():
    frozen = RBF(Q, lengthscale=LENGTHSCALES)
    frozen.lengthscale_unconstrained.requires_grad_(False)
    assert gplvm(frozen).latent_symmetry()[::2] == ("signs", {})
    different = RBF(Q)
    different.lengthscale = PyroSample(dist.LogNormal(LENGTHSCALES, 0.1).to_event(1))
    assert gplvm(different).latent_symmetry().group == "signs"
    same = RBF(Q)
    same.lengthscale = PyroSample(dist.LogNormal(torch.zeros(Q), 0.1).to_event(1))
    assert gplvm(same).latent_symmetry()[::2] == ("signed permutations", {"kernel.lengthscale": -1})
    one = RBF(Q)
    one.lengthscale = PyroSample(dist.LogNormal(torch.zeros(1), 0.1).to_event(1))
    assert gplvm(one).latent_symmetry()[::2] == ("rotations", {})
    assert gplvm(RBF(2, active_dims=[0, 2])).latent_symmetry().group == "none"

    class Own(RBF):
        def k(self, X, Z, params):
            return super().k(X, Z, params) + X[..., :1] * Z[..., :1].mT

    assert gplvm(Own(Q)).latent_symmetry().group == "none"
    assert gplvm(SpectralMixture(Q)).latent_symmetry().group == "none"
    points = gplvm(RBF(Q, ard=False))
    points.inducing_points_unconstrained.requires_grad_(False)
    assert points.latent_symmetry().group == "none"
    for scale, group in ((torch.ones(Q), "rotations"), (LENGTHSCALES, "none")):
        with_prior = gplvm(RBF(Q, ard=False))
        with_prior.inducing_points = PyroSample(dist.Normal(torch.zeros(5, Q), scale).to_event(2))
        assert with_prior.latent_symmetry().group == group

    known = {"prior_scale": torch.full((N, Q), 0.5)}, {"covariates": torch.ones(N, 1)}
    for parts in known:
        rows = RowArguments(**parts)
        kernel = RBF(Q + (rows.covariates is not None), ard=False)
        assert BayesianGPLVM(N, D, Q, kernel, num_inducing=5, rows=rows).latent_symmetry().group == "none"
    weights = RowArguments(weight=torch.ones(N))
    assert BayesianGPLVM(N, D, Q, RBF(Q, ard=False), num_inducing=5, rows=weights).latent_symmetry().group == "rotations"

    class Other(BayesianGPLVM):
        def forward(self, y=None, idx=None):
            return super().forward(y, idx)

    assert Other(N, D, Q, num_inducing=5).latent_symmetry().group == "none"


PROCESSES = {
    "matern": lambda: Matern(1, lengthscale=LENGTHSCALES[:, None], batch_shape=(Q,), active_dims=[0]),
    "rational quadratic": lambda: RationalQuadratic(1, LENGTHSCALES, batch_shape=(Q,), active_dims=[0]),
    "spectral mixture": lambda: SpectralMixture(1, 2, scales=LENGTHSCALES[:, None, None], batch_shape=(Q,), active_dims=[0]),
    "categorical": lambda: Categorical(variance=LENGTHSCALES, batch_shape=(Q,), active_dims=[1]),
    "index": lambda: Index(4, 2, batch_shape=(Q,), active_dims=[1]),
    "embedded": lambda: Embedded(RBF(2, batch_shape=(Q,)), 4, batch_shape=(Q,), active_dims=[1]),
    "embedded once": lambda: Embedded(RBF(2, variance=LENGTHSCALES, batch_shape=(Q,)), 4, active_dims=[1]),
}


@pytest.mark.parametrize("name", PROCESSES)
def test_the_prior_of_processes_is_permuted_with_the_parameters_of_a_kernel(name):
    kernel = (PROCESSES[name]() * RBF(1, active_dims=[0])).double()
    x = torch.stack([torch.linspace(0.0, 1.0, 6), torch.arange(6) % 4], -1).double()
    before, symmetry, matrix = kernel(x).detach(), symmetry_of_processes(kernel), signed_permutation()
    assert symmetry.group == "signed permutations"
    order = matrix.abs().argmax(0)
    for name, axis in symmetry.scales.items():
        *path, parameter = name.split(".")[1:]
        owner = kernel.get_submodule(".".join(path))
        setattr(owner, parameter, getattr(owner, parameter).detach().index_select(axis, order))
    assert not torch.allclose(kernel(x), before)
    torch.testing.assert_close(kernel(x), before[order])


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize(
    ("make", "group", "matrix"),
    [
        (lambda: Matern(1, lengthscale=LENGTHSCALES[:, None], batch_shape=(Q,)), "signed permutations", signed_permutation()),
        (lambda: frozen(Matern(1, lengthscale=0.3, batch_shape=(Q,))) + 0.5 * RBF(1), "rotations", rotation()),
    ],
)
def test_a_gp_vae_is_the_same_after_a_transformation_of_its_group(make, group, matrix, sparse):
    kernel = make()
    own_points = group != "rotations"
    if sparse:
        model = SparseGPVAE(kernel, MLP(Q, D, [5]), torch.randn(*(Q,) * own_points, 6, 1)).double()
    else:
        model = GPVAE(kernel, MLP(Q, D, [5])).double()
    symmetry = model.latent_symmetry()
    assert symmetry.group == group
    f, u = torch.randn(N, Q, dtype=torch.float64), torch.randn(Q, 6, dtype=torch.float64)
    args = (T.double(), Y.double())
    latents = {"f": f, "u": u} if sparse else {"f": f.mT}
    before = log_joint(model, *args, **latents)
    for name, axis in symmetry.scales.items():
        parameter = name.removeprefix("kernel.")
        value = getattr(model.kernel, parameter).detach()
        setattr(model.kernel, parameter, (value.movedim(axis, -1) @ matrix.abs()).movedim(-1, axis))
    if sparse and own_points:
        model.inducing_points = torch.einsum("qmp,qr->rmp", model.inducing_points.detach(), matrix.abs())
    with torch.no_grad():
        model.decoder[0].weight.copy_(model.decoder[0].weight @ matrix)
    after = {
        name: (value.movedim(symmetry.vectors[name], -1) @ matrix).movedim(-1, symmetry.vectors[name])
        for name, value in latents.items()
    }
    torch.testing.assert_close(log_joint(model, *args, **after), before, rtol=1e-6, atol=1e-6)


def test_processes_of_different_kernels_or_fixed_decoders_are_not_permuted():
    stack = Stack(RBF(1), Matern(1))
    assert GPVAE(stack, MLP(2, D)).latent_symmetry()[::2] == ("signs", {})
    assert GPVAE(RBF(1, batch_shape=(2,)), torch.nn.Linear(2, D)).latent_symmetry().group == "none"
    decoder = MLP(2, D)
    decoder[0].weight.requires_grad_(False)
    assert GPVAE(RBF(1, batch_shape=(2,)), decoder).latent_symmetry().group == "none"
    points = SparseGPVAE(RBF(1, batch_shape=(2,)), MLP(2, D), torch.randn(2, 6, 1))
    points.inducing_points_unconstrained.requires_grad_(False)
    assert points.latent_symmetry()[::2] == ("signs", {})
    assert SparseGPVAE(RBF(1), MLP(2, D), torch.randn(2, 6, 1)).latent_symmetry()[::2] == ("signed permutations", {})


def test_a_random_feature_model_is_the_same_after_a_signed_permutation():
    model, matrix = RandomFeatureLVM(N, D, Q, num_frequencies=4, num_components=3).double(), signed_permutation()
    model.component_locs = torch.randn(3, Q, dtype=torch.float64)
    assert model.latent_symmetry().group == "signed permutations"
    trace = poutine.trace(model).get_trace(Y.double())
    sites = {name: trace.nodes[name]["value"] for name in ("alpha", "v", "omega", "X", "a")}
    before = log_joint(model, Y.double(), **sites)
    model.component_locs = model.component_locs.detach() @ matrix
    model.component_scales = model.component_scales.detach() @ matrix.abs()
    sites |= {name: sites[name] @ matrix for name in ("X", "omega")}
    torch.testing.assert_close(log_joint(model, Y.double(), **sites), before, rtol=1e-6, atol=1e-6)
    model.component_locs_unconstrained.requires_grad_(False)
    assert model.latent_symmetry().group == "none"


@pytest.mark.parametrize(
    ("group", "matrix"), [("rotations", rotation()), ("signed permutations", signed_permutation()), ("signs", signs())]
)
def test_the_closest_transformation_is_found(group, matrix):
    X = np.random.default_rng(0).normal(size=(20, Q))
    np.testing.assert_allclose(closest_transformation(X, X @ matrix.numpy(), group), matrix, atol=1e-12)
    noisy = X @ matrix.numpy() + 0.1 * np.random.default_rng(1).normal(size=X.shape)
    found = closest_transformation(X, noisy, group)
    np.testing.assert_allclose(found.T @ found, np.eye(Q), atol=1e-12)
    others = [rotation(), signed_permutation(), signs(), torch.eye(Q)] if group == "rotations" else [signs(), torch.eye(Q)]
    for other in others:
        assert np.linalg.norm(X @ found - noisy) <= np.linalg.norm(X @ other.numpy() - noisy) + 1e-12


def gplvm_guide(loc, scale, lengthscale):
    """Guide of a GPLVM at given means and standard deviations."""

    def guide(y, idx=None):
        with pyro.plate("outputs", D, dim=-1):
            pyro.sample("u", dist.Normal(torch.zeros(5), 1.0).to_event(1))
        with pyro.plate("data", N, dim=-1):
            pyro.sample("X", dist.Normal(loc, scale).to_event(1))
        if lengthscale is not None:
            pyro.sample("kernel.lengthscale", dist.LogNormal(lengthscale.log(), 0.05).to_event(1))

    return guide


def copies(group, num_copies=4):
    """Fits whose posteriors are exact copies of each other under the symmetry of their model."""
    generator = torch.Generator().manual_seed(0)
    loc, scale = torch.randn(N, Q, generator=generator), 0.2 * torch.rand(N, Q, generator=generator) + 0.1
    fits = []
    for number in range(num_copies):
        kernel = RBF(Q, ard=group != "rotations")
        if group == "rotations":
            matrix, scale = (
                torch.as_tensor(ortho_group.rvs(Q, random_state=number), dtype=torch.float32),
                torch.full((N, Q), 0.2),
            )
            lengthscale = None
        else:
            kernel.lengthscale = PyroSample(dist.LogNormal(torch.zeros(Q), 1.0).to_event(1))
            matrix = torch.eye(Q)[torch.randperm(Q, generator=generator)] * torch.tensor([1.0, -1.0, 1.0]).roll(number)
            lengthscale = LENGTHSCALES @ matrix.abs()
        matrix = torch.eye(Q) if number == 0 else matrix
        lengthscale = LENGTHSCALES if number == 0 and group != "rotations" else lengthscale
        model = BayesianGPLVM(N, D, Q, kernel, num_inducing=5)
        fits.append((model, gplvm_guide(loc @ matrix, scale @ matrix.abs() if group != "rotations" else scale, lengthscale)))
    return fits


@pytest.mark.parametrize("group", ["rotations", "signed permutations"])
def test_r_hat_of_copies_is_one_after_alignment_and_large_before(group):
    fits = copies(group)
    options = {"num_samples": 300, "seed": 0, "posterior_predictive": False, "log_likelihood": False}
    aligned, as_it_is = (chains_to_arviz(fits, Y, align_latents=align, **options) for align in (True, False))
    names = ["X"] if group == "rotations" else ["X", "kernel.lengthscale"]
    for name in names:
        assert float(arviz_stats.rhat(aligned, var_names=name)[name].max()) < 1.03, name
        assert float(arviz_stats.rhat(as_it_is, var_names=name)[name].max()) > 1.5, name
    assert aligned.attrs["alignment"] == f"{group} of {', '.join(names)}, to the chain 0"
    assert "alignment" not in as_it_is.attrs
    matrices = np.array(json.loads(aligned.attrs["alignment_matrices"])["X"])
    expected = np.einsum("cdnq,cqr->cdnr", as_it_is.posterior["X"], matrices)
    np.testing.assert_allclose(aligned.posterior["X"], expected, atol=1e-5)
    np.testing.assert_array_equal(aligned.posterior["X"].sel(chain=0), as_it_is.posterior["X"].sel(chain=0))
    np.testing.assert_array_equal(aligned.posterior["u"], as_it_is.posterior["u"])
    np.testing.assert_allclose(aligned.log_prior["X"].sum(), as_it_is.log_prior["X"].sum(), rtol=1e-6)


def test_restarts_of_a_gplvm_agree_after_alignment():
    torch.manual_seed(0)
    X = torch.randn(40, 2)
    data = torch.tanh(X @ torch.randn(2, 6)) + 0.05 * torch.randn(40, 6)

    def make(seed):
        noisy = X @ torch.as_tensor(ortho_group.rvs(2, random_state=seed), dtype=torch.float32) + 0.3 * torch.randn(40, 2)
        model = BayesianGPLVM(40, 6, 2, RBF(2, lengthscale=1.5, ard=False), num_inducing=10).initialize(data, latents=noisy)
        return model, MeanFieldGuide(model)

    quick = {"compile": "torchscript", "progress": False}
    restarts = fit_restarts(make, data, num_restarts=3, loss=MeanFieldELBO(), num_steps=400, **quick)
    spread = {}
    for align in (True, False):
        tree = chains_to_arviz(restarts, data, num_samples=100, seed=0, align_latents=align)
        means = tree.posterior["X"].mean("draw")
        spread[align] = float(means.std("chain").mean())
    assert tree.posterior.sizes["chain"] == 3
    assert spread[True] < 0.5 * spread[False], spread


def test_random_features_and_processes_are_aligned():
    model = RandomFeatureLVM(N, D, 2, num_frequencies=4, num_components=2).initialize(Y)
    guide = RandomFeatureGuide(model)
    tree = chains_to_arviz([(model, guide)] * 2, Y, num_samples=50, seed=0)
    assert tree.attrs["alignment"] == "signed permutations of X, omega, to the chain 0"
    series = GPVAE(RBF(1, batch_shape=(2,)), MLP(2, D))
    pair = series, StructuredGPGuide(series, encoders={"f": IndexNet(D, 2)})
    tree = chains_to_arviz([pair, pair], T, Y, num_samples=50, seed=0)
    assert tree.attrs["alignment"] == "signed permutations of f, to the chain 0"
    pairs = []
    for _ in range(2):
        torch.manual_seed(0)
        model = GPVAE(frozen(RBF(1, batch_shape=(2,))), MLP(4, D), independent_dim=2)
        pairs.append((model, StructuredGPGuide(model, encoders={"f": IndexNet(D, 2), "w": IndexNet(D, 2)})))
    tree = chains_to_arviz(pairs, T, Y, num_samples=50, seed=0)
    assert tree.attrs["alignment"] == "rotations of f and rotations of w, to the chain 0"
    matrices = json.loads(tree.attrs["alignment_matrices"])
    assert [np.shape(matrices[name]) for name in ("f", "w")] == [(2, 2, 2)] * 2


def test_what_was_not_aligned_is_said():
    def model(y):
        pyro.sample("loc", dist.Normal(0.0, 1.0))

    pair = model, AutoNormal(model)
    assert chains_to_arviz([pair], Y, num_samples=5).attrs["alignment"] == "none: there is one fit"
    tree = chains_to_arviz([pair, pair], Y, num_samples=5)
    assert tree.attrs["alignment"] == "none: the models do not declare one latent_symmetry()"
    fixed = BayesianGPLVM(N, D, Q, RBF(2, active_dims=[0, 1]), num_inducing=5).initialize(Y)
    guide = MeanFieldGuide(fixed)
    tree = chains_to_arviz([(fixed, guide)] * 2, Y, num_samples=5)
    assert tree.attrs["alignment"].startswith("none: the model has no symmetry")
