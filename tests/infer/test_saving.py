"""Files of models and guides."""

import copy
import json
import subprocess
import sys

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.nn import PyroSample
from safetensors.torch import load_file, save_file
from torch import nn

from pyro_lvgp import (
    GPVAE,
    AutoAnnealedLangevin,
    BayesianGPLVM,
    MeanFieldGuide,
    RandomFeatureGuide,
    RandomFeatureLVM,
    StructuredGPGuide,
    fit,
)
from pyro_lvgp.infer import StructuredELBO, load, save
from pyro_lvgp.kernels import RBF, Cosine, Linear, Matern, Periodic, RationalQuadratic, SpectralMixture
from pyro_lvgp.likelihoods import Bernoulli, Gaussian, Heterogeneous, NegativeBinomial, Ordinal, Poisson, StudentT
from pyro_lvgp.networks import MLP, IndexNet, ZeroImputation

N, D, Q = 12, 3, 2


def rows():
    return torch.randn(N, D, generator=torch.Generator().manual_seed(0), dtype=torch.get_default_dtype())


def gplvm(**options):
    return BayesianGPLVM(N, D, Q, num_inducing=4, **options)


def low_rank():
    model = BayesianGPLVM.from_data(rows(), Q, rank=1)
    return model, MeanFieldGuide(model, covariance={"X": "full"})


def encoded():
    model = gplvm()
    return model, MeanFieldGuide(model, encoders={"X": ZeroImputation(D, Q, [5], activation=nn.Tanh)})


def composite():
    model = gplvm(kernel=RBF(1, active_dims=[0]) * Linear(1, active_dims=[1]) + Matern(Q, 1.5))
    return model, MeanFieldGuide(model)


def counts():
    model = gplvm(likelihood=Poisson(), likelihood_term="svgp")
    return model, MeanFieldGuide(model)


def annealed():
    model = gplvm()
    return model, AutoAnnealedLangevin(model, num_steps=2, base_guide=MeanFieldGuide(model, init_scale=0.2))


def random_features():
    model = RandomFeatureLVM(N, D, Q, num_frequencies=4, num_components=2)
    return model, RandomFeatureGuide(model)


PAIRS = [low_rank, encoded, composite, counts, annealed, random_features]


def fitted(make):
    model, guide = make()
    Y = rows().exp().round() if make is counts else rows()
    optim = {"optim": guide.blocks()} if make is random_features else {}
    fit(model, guide, Y, num_steps=2, progress=False, seed=0, **optim)
    return model, guide


def predictions(model, guide):
    torch.manual_seed(0)
    X = torch.linspace(-1.0, 1.0, 5 * Q).reshape(5, Q).to(next(model.parameters()).dtype)
    return model.predict(guide, X, num_samples=3).mean


@pytest.mark.parametrize("make", PAIRS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_predictions_of_a_file_are_those_of_the_fit(make, dtype, tmp_path):
    torch.set_default_dtype(dtype)
    try:
        model, guide = fitted(make)
    finally:
        torch.set_default_dtype(torch.float32)
    save(tmp_path / "fit", model, guide)
    expected = predictions(model, guide)
    pyro.clear_param_store()
    again, its_guide = load(tmp_path / "fit")
    assert type(again) is type(model)
    assert torch.equal(predictions(again, its_guide), expected)
    assert {name: p.dtype for name, p in its_guide.named_parameters()} == {n: p.dtype for n, p in guide.named_parameters()}


@pytest.mark.parametrize("decoder", [lambda: MLP(2, D, [6]), lambda: nn.Linear(2, D)])
def test_a_gp_vae_with_encoders_predicts_as_before(decoder, tmp_path):
    model = GPVAE(RBF(1, lengthscale=0.2, batch_shape=(2,)), decoder(), Gaussian(data_dim=D))
    guide = StructuredGPGuide(model, encoders={"f": IndexNet(D, 2)})
    t, y = torch.linspace(0.0, 1.0, N)[:, None], rows()
    fit(model, guide, t, y, loss=StructuredELBO(), num_steps=2, progress=False)
    save(tmp_path / "fit", model, guide)
    again = tuple(load(tmp_path / "fit"))
    means = []
    for pair in ((model, guide), again):
        torch.manual_seed(0)
        means.append(pair[0].predict(pair[1], t, y, torch.tensor([[1.1]]), num_samples=3).mean)
    assert torch.equal(*means)


def test_another_process_needs_no_data(tmp_path):
    model, guide = fitted(composite)
    save(tmp_path / "fit", model, guide)
    code = f"""
import torch
from pyro_lvgp.infer import load
model, guide = load({str(tmp_path / "fit")!r})
torch.manual_seed(0)
print(model.predict(guide, torch.linspace(-1.0, 1.0, 10).reshape(5, 2), num_samples=3).mean.double().sum().item())
"""
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert float(found) == pytest.approx(predictions(model, guide).double().sum().item(), rel=1e-5)


def test_a_model_without_a_guide_keeps_settings_frozen_parameters_and_the_random_state(tmp_path):
    model = gplvm(likelihood=StudentT(1.0, df=4.0))
    model.likelihood_term = "fitc"
    model.likelihood = StudentT(2.0, df=5.0)
    model.kernel.lengthscale_unconstrained.requires_grad_(False)
    state = torch.get_rng_state()
    save(tmp_path / "model", model)
    again, guide = load(tmp_path / "model")
    assert torch.equal(state, torch.get_rng_state())
    assert guide is None
    assert again.likelihood_term == "fitc"
    assert again.likelihood.df == 5.0
    frozen = {name for name, value in again.named_parameters() if not value.requires_grad}
    assert frozen == {name for name, value in model.named_parameters() if not value.requires_grad}
    assert again._pyro_name != model._pyro_name


@pytest.mark.parametrize(
    "options",
    [
        {"kernel": Periodic(Q, period=2.0)},
        {"kernel": Linear(Q) + Matern(Q, 2.5, ard=False)},
        {"kernel": Cosine(1, active_dims=[1]) * RBF(Q)},
        {"kernel": RationalQuadratic(Q, 0.5) + SpectralMixture(Q, 2)},
        {"likelihood": Ordinal.from_data((torch.arange(N * D).reshape(N, D) % 4).float())},
        {"likelihood": Heterogeneous([(Gaussian(), [0, 1]), (Bernoulli(), [2])])},
        {"likelihood": NegativeBinomial(3.0)},
    ],
    ids=lambda options: type(next(iter(options.values()))).__name__,
)
def test_kernels_and_likelihoods_are_made_again(options, tmp_path):
    model = gplvm(**options)
    save(tmp_path / "model", model)
    again, _ = load(tmp_path / "model")
    X = torch.linspace(-1.0, 1.0, 5 * Q).reshape(5, Q)
    assert torch.equal(again.kernel(X, X), model.kernel(X, X))
    f = torch.zeros(5, D)
    params = (each.likelihood.params() for each in (model, again))
    mean, its = (each.likelihood.distribution(f, p).mean for each, p in zip((model, again), params, strict=True))
    assert torch.equal(mean, its)


class TestRefuses:
    @pytest.fixture
    def refused(self, tmp_path):
        def check(error, match, model, guide=None):
            with pytest.raises(error, match=match):
                save(tmp_path / "fit", model, guide)
            assert not list(tmp_path.iterdir())

        return check

    def test_code_of_the_user(self, refused):
        class Net(nn.Module):
            pass

        model = gplvm()
        guide = MeanFieldGuide(model, init_loc_fn=lambda site: torch.zeros(site["fn"].shape()))
        guide(rows())
        refused(TypeError, r"got function as guide.init_loc_fn", model, guide)
        refused(TypeError, r"got a PyroNet as model\[1\], whose code", GPVAE(RBF(1, batch_shape=(2,)), Net()))
        refused(TypeError, "got a Net as model", Net())

    def test_guides_before_their_first_call(self, refused):
        model = gplvm()
        refused(ValueError, "expected a guide after a call", model, MeanFieldGuide(model))

    def test_copies(self, refused):
        refused(ValueError, "a copied or unpickled BayesianGPLVM", copy.deepcopy(gplvm()))

    def test_priors_and_parts_set_after_construction(self, refused):
        model = gplvm()
        model.kernel.lengthscale = PyroSample(dist.LogNormal(torch.zeros(Q), 1.0).to_event(1))
        refused(ValueError, "kernel.lengthscale_unconstrained.* set after construction", model)
        model = gplvm()
        model.likelihood = StudentT(1.0)
        refused(ValueError, "likelihood.*set after construction", model)
        model = gplvm()
        model.kernel.weights = torch.ones(2)  # a tensor that is no parameter
        refused(ValueError, "another RBF at 'kernel'", model)

    def test_several_dtypes(self, refused):
        model = gplvm()
        model.kernel.double()
        refused(ValueError, "expected parameters of one dtype", model)

    def test_folders_that_do_not_exist(self, tmp_path):
        with pytest.raises(OSError, match="expected to write to"):
            save(tmp_path / "nowhere" / "fit", gplvm())

    def test_damaged_files_and_those_of_others(self, tmp_path):
        path = tmp_path / "fit"
        save(path, *fitted(composite))
        content = bytearray(path.read_bytes())
        content[-5] ^= 1
        (tmp_path / "flipped").write_bytes(content)
        (tmp_path / "short").write_bytes(content[: len(content) // 2])
        save_file({"x": torch.zeros(2)}, tmp_path / "tensors")
        for name, match in (("flipped", "changed or damaged"), ("short", "cannot be read"), ("tensors", "tensors alone")):
            with pytest.raises(ValueError, match=match):
                load(tmp_path / name)
        with pytest.raises(FileNotFoundError):
            load(tmp_path / "missing")

    @pytest.mark.parametrize(
        ("change", "match"),
        [
            ({"class": "os.system", "args": ["true"], "kwargs": {}}, "got 'os.system'"),
            ({"class": "pyro_lvgp.infer.saving.Path", "args": ["x"], "kwargs": {}}, "got 'pyro_lvgp.infer.saving.Path'"),
            ({"layer": "functional", "args": [], "kwargs": {}}, "expected a layer of torch.nn, got 'functional'"),
        ],
    )
    def test_classes_that_are_no_modules_of_the_package(self, change, match, tmp_path, monkeypatch):
        """Even if whoever changed the file knows the digest."""
        monkeypatch.setattr("pyro_lvgp.infer.saving._digest", lambda *args: "known")
        path = tmp_path / "fit"
        save(path, gplvm())
        tensors = load_file(path)
        from safetensors import safe_open

        with safe_open(path, framework="pt") as file:
            header = json.loads(file.metadata()["pyro_lvgp"])
        save_file(tensors, path, {"pyro_lvgp": json.dumps(header | {"model": change}), "digest": "known"})
        with pytest.raises(ValueError, match=match):
            load(path)
