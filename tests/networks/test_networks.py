"""Encoders ignore what is missing, and train inside a guide."""

import copy

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import SVI, TraceMeanField_ELBO
from pyro.nn import PyroModule
from pyro.optim import Adam
from torch import nn

from pyro_lvgp.guides import MeanFieldGuide
from pyro_lvgp.models import BayesianGPLVM
from pyro_lvgp.networks import MLP, FactorNet, IndexNet, PointNet, ZeroImputation, as_pyro_module

D, Q = 4, 3


@pytest.fixture
def Y(dtype):
    Y = torch.randn(6, D, dtype=dtype)
    Y[torch.rand(Y.shape) < 0.4] = torch.nan
    return Y


@pytest.mark.parametrize("hidden_dims", [(), (5,), (7, 5)])
def test_mlp_shapes(hidden_dims):
    net = MLP(D, 2, hidden_dims, nn.Tanh)
    sizes = [D, *hidden_dims, 2]
    assert [m.weight.shape for m in net if isinstance(m, nn.Linear)] == list(zip(sizes[1:], sizes[:-1], strict=True))
    assert sum(isinstance(m, nn.Tanh) for m in net) == len(hidden_dims)
    assert isinstance(net[-1], nn.Linear)
    assert net(torch.zeros(3, 6, D)).shape == (3, 6, 2)


@pytest.mark.parametrize("covariance", ["diagonal", "full"])
class TestZeroImputation:
    def test_shapes_dtype_and_valid_scales(self, covariance, Y):
        loc, scale = ZeroImputation(D, Q, covariance=covariance).to(Y.dtype)(Y)
        assert loc.shape == (6, Q)
        assert loc.dtype == scale.dtype == Y.dtype
        if covariance == "diagonal":
            assert scale.shape == (6, Q)
            assert (scale > 0).all()
        else:
            assert scale.shape == (6, Q, Q)
            assert dist.constraints.lower_cholesky.check(scale).all()
            assert (scale.tril(-1) != 0).any()
            covariances = scale @ scale.mT
            torch.testing.assert_close(torch.linalg.cholesky(covariances), scale, rtol=1e-3, atol=1e-4)

    def test_is_the_network_of_values_and_indicators(self, covariance, Y):
        """Whatever stands at a missing entry, the network sees zero and that it is missing, unlike a zero that was seen."""
        encoder = ZeroImputation(D, Q, covariance=covariance).to(Y.dtype)
        missing = torch.isnan(Y)
        inputs = torch.cat([torch.where(missing, torch.zeros_like(Y), Y), (~missing).to(Y.dtype)], -1)
        torch.testing.assert_close(encoder(Y)[0], encoder.net(inputs)[:, :Q])
        zeros = encoder(Y.nan_to_num())
        rows = missing.any(1)
        assert rows.any()
        for found, other in zip(encoder(Y), zeros, strict=True):
            assert found.isfinite().all()
            assert (found[rows] != other[rows]).any()
            torch.testing.assert_close(found[~rows], other[~rows])

    def test_missing_entries_send_no_gradient(self, covariance, Y):
        encoder = ZeroImputation(D, Q, covariance=covariance).to(Y.dtype)
        Y.requires_grad_()
        loc, scale = encoder(Y)
        (gradient,) = torch.autograd.grad(loc.sum() + scale.square().sum(), Y)
        assert (gradient[torch.isnan(Y)] == 0).all()
        assert (gradient[~torch.isnan(Y)] != 0).all()

    def test_gradients_are_finite_with_everything_missing(self, covariance, dtype):
        encoder = ZeroImputation(D, Q, covariance=covariance).to(dtype)
        loc, scale = encoder(torch.full((2, D), torch.nan, dtype=dtype))
        (loc.sum() + scale.square().sum()).backward()
        for name, parameter in encoder.named_parameters():
            assert parameter.grad.isfinite().all(), name
        assert any((parameter.grad != 0).any() for parameter in encoder.parameters())


def of_outputs(encoder, outputs):
    """The encoder of some outputs, in an order of their own, with the weights that they have in another."""
    result, D = copy.deepcopy(encoder), encoder.data_dim
    for name, parameter in result.named_parameters():
        if not name.startswith("rho") and len(parameter) == D:
            parameter.data = parameter.data[outputs]
    result.data_dim = len(outputs)
    if isinstance(encoder, FactorNet):
        result.init_scale *= (D / len(outputs)) ** 0.5
    else:  # 1 / √D is that of all outputs
        result.rho[0].weight.data *= (len(outputs) / D) ** 0.5
    return result


def one_by_one(network, p, value):
    """What the network for output p says about one value, with loops over units."""
    x = value[None]
    for layer in network:
        if not hasattr(layer, "weight"):
            x = layer(x)
            continue
        weight, bias = layer.weight, layer.bias
        if weight.dim() == 3:
            weight, bias = weight[min(p, len(weight) - 1)].T, bias[p]
        x = torch.stack([sum(w * x_i for w, x_i in zip(row, x, strict=True)) + b for row, b in zip(weight, bias, strict=True)])
    return x


def loc_and_scale(output, init_scale):
    loc, raw = output[:Q], output[Q:]
    return loc, (1 + (raw.exp() * (torch.tensor(init_scale, dtype=raw.dtype).exp() - 1))).log()


@pytest.mark.parametrize("hidden_dims", [(), (6,), (6, 5)])
@pytest.mark.parametrize("Net", [PointNet, IndexNet])
def test_sum_nets_by_hand(Net, hidden_dims):
    Y = torch.randn(5, D, dtype=torch.double)
    Y[0, 1] = Y[1, :3] = Y[2] = torch.nan
    encoder = Net(D, Q, hidden_dims, feature_dim=3, init_scale=0.2).double()
    for y, loc, scale in zip(Y, *encoder(Y), strict=True):
        total = torch.zeros(3, dtype=torch.double)
        for p in range(D):
            if not y[p].isnan():
                total += one_by_one(encoder.h, p, y[p])
        torch.testing.assert_close((loc, scale), loc_and_scale(encoder.rho(total / D**0.5), 0.2))


def test_point_net_tells_outputs_apart_by_their_embeddings_alone(Y):
    encoder = PointNet(D, Q).to(Y.dtype)
    encoder.h[0].bias.data[:] = encoder.h[0].bias.data[0]
    torch.testing.assert_close(encoder(Y[:, [2, 0, 3, 1]]), encoder(Y))


@pytest.mark.parametrize("hidden_dims", [(), (6,), (6, 5)])
def test_factor_net_is_a_product_of_densities(hidden_dims):
    Y = torch.randn(5, D, dtype=torch.double)
    Y[0, 1] = Y[1, :3] = torch.nan
    encoder = FactorNet(D, Q, hidden_dims, init_scale=0.2).double()
    f = torch.randn(7, Q, dtype=torch.double)
    for y, loc, scale in zip(Y, *encoder(Y), strict=True):
        factors = [loc_and_scale(one_by_one(encoder.factors, p, y[p]), 0.2 * D**0.5) for p in range(D) if not y[p].isnan()]
        difference = dist.Normal(loc, scale).log_prob(f) - sum(dist.Normal(*factor).log_prob(f) for factor in factors)
        torch.testing.assert_close(difference, difference[:1].expand_as(difference))


def test_factor_net_is_surer_with_each_output_it_sees(Y):
    encoder = FactorNet(D, Q).to(Y.dtype)
    y = torch.randn(D, dtype=Y.dtype)
    seen = torch.where(torch.ones(D, D + 1, dtype=torch.bool).triu(1).T, y, torch.nan)
    loc, scale = encoder(seen)
    assert (scale.diff(dim=0) < 0).all()
    assert (loc[0] == 0).all()
    assert (scale[0] > 1e7).all()
    assert (scale[0].pow(-4) >= torch.finfo(Y.dtype).tiny).all()


class TestLoadings:
    W = torch.tensor([[2.0, 0.0, 0.0], [-0.5, 0.0, 1.0], [0.0, 1.0, 0.0], [0.0, 0.3, 0.0]])

    def test_factors_start_where_a_linear_decoder_has_them(self, Y):
        """With precision Σ W² / s², and precision times loc Σ W y / s²."""
        W = self.W.to(Y.dtype)
        loc, scale = FactorNet(D, Q, init_scale=0.2, loadings=W).to(Y.dtype)(Y)
        seen = (~Y.isnan())[..., None]
        precision = (seen * W.square()).sum(-2) / 0.2**2
        torch.testing.assert_close(loc * precision, (Y.nan_to_num()[..., None] * W).sum(-2) / 0.2**2)
        some = (seen & (W != 0)).any(-2)
        assert (loc[~some] == 0).all()
        assert (scale[~some] > 1e7).all()
        torch.testing.assert_close(scale[some], precision[some].rsqrt())

    def test_networks_learn_beside_them(self):
        encoder = FactorNet(D, Q, (6,), loadings=self.W.clone().requires_grad_())
        loc, scale = encoder(torch.randn(7, D))
        (loc.square().sum() + scale.log().sum()).backward()
        still = {name for name, parameter in encoder.named_parameters() if not parameter.grad.any()}
        assert still == {"factors.0.weight", "factors.0.bias"}  # until the layer above them, which starts at zero, has moved

    @pytest.mark.parametrize("loadings", [torch.zeros(D, Q), torch.ones(Q, D), torch.full((D, Q), torch.nan)])
    def test_others_are_refused(self, loadings):
        with pytest.raises(ValueError, match=r"expected loadings of shape \[4, 3\], finite and not all zero"):
            FactorNet(D, Q, loadings=loadings)


@pytest.mark.parametrize("Net", [PointNet, IndexNet, FactorNet])
class TestPartialInferenceNetworks:
    def test_shapes_with_any_leading_dimensions(self, Net, Y):
        encoder = Net(D, Q).to(Y.dtype)
        rows = encoder(Y)
        for shape in [(6,), (2, 3), (1, 6, 1), (0, 2)]:
            some = Y[: torch.Size(shape).numel()]
            for found, row in zip(encoder(some.reshape(*shape, D)), rows, strict=True):
                assert found.dtype == Y.dtype
                torch.testing.assert_close(found, row[: len(some)].reshape(*shape, Q))
        torch.testing.assert_close(encoder(Y[1]), tuple(x[1] for x in rows))

    def test_missing_outputs_might_as_well_not_be_there(self, Net):
        """Values and gradients are those of an encoder that never heard of the outputs that are missing."""
        keep, lost = [0, 2, 3], [1]
        encoder = Net(D, Q).double()
        twin = of_outputs(encoder, keep)
        Y = torch.randn(6, D, dtype=torch.double)
        Y[:, lost] = torch.nan
        Y.requires_grad_()
        kept = Y.detach()[:, keep].requires_grad_()
        found, expected = encoder(Y), twin(kept)
        torch.testing.assert_close(found, expected)
        for loc, scale in (found, expected):
            (loc.sin().sum() + scale.square().sum()).backward()
        torch.testing.assert_close(Y.grad[:, keep], kept.grad)
        assert (kept.grad != 0).all()
        assert (Y.grad[:, lost] == 0).all()
        for (name, mine), (_, other) in zip(encoder.named_parameters(), twin.named_parameters(), strict=True):
            mine, other = mine.grad, other.grad
            if name == "rho.0.weight":
                other = other * (len(keep) / D) ** 0.5  # as it scales the weight
            if len(mine) != len(other):
                assert (mine[lost] == 0).all(), name
                mine = mine[keep]
            assert (mine != 0).any(), name
            torch.testing.assert_close(mine, other, msg=name)

    def test_nothing_observed(self, Net, dtype):
        """Also beside rows with data, and through what a structured guide does with it."""
        Y = torch.randn(3, D, dtype=dtype)
        Y[1] = torch.nan
        encoder = Net(D, Q).to(dtype)
        loc, scale = encoder(Y)
        precision = torch.where(Y.isnan().all(1, keepdim=True), 0.0, scale.square().reciprocal())
        values = {"loc": loc, "log scale": scale.log(), "precision": precision, "loc * precision": loc * precision}
        for name, value in values.items():
            assert value.isfinite().all(), name
            for parameter in torch.autograd.grad(value.sum(), encoder.parameters(), retain_graph=True, allow_unused=True):
                assert parameter is None or parameter.isfinite().all(), name

    def test_outliers_leave_scales_that_can_be_inverted(self, Net, dtype):
        encoder = Net(D, Q).to(dtype)
        loc, scale = encoder(1e6 * torch.randn(50, D, dtype=dtype))
        precision = scale.square().reciprocal()
        assert (precision > 0).all()
        assert loc.isfinite().all()
        for gradient in torch.autograd.grad((loc / 1e6).sum() + precision.log().sum(), encoder.parameters()):
            assert gradient.isfinite().all()

    def test_relabelled_outputs(self, Net, Y):
        """Outputs have no order, but each has its own meaning."""
        encoder, order = Net(D, Q).to(Y.dtype), [2, 0, 3, 1]
        torch.testing.assert_close(of_outputs(encoder, order)(Y[:, order]), encoder(Y))
        for found, other in zip(encoder(Y[:, order]), encoder(Y), strict=True):
            assert ((found - other).abs() > 1e-4).all(-1).any()

    @pytest.mark.parametrize("local", [True, False])
    def test_as_pyro_module(self, Net, local, Y):
        with pyro.settings.context(module_local_params=local):
            encoder = Net(D, Q).to(Y.dtype)
            before, count = encoder(Y), len(list(encoder.parameters()))
            assert as_pyro_module(encoder) is encoder
            assert all(isinstance(module, PyroModule) for module in encoder.modules())
            assert all(name.endswith("_unconstrained") for name, _ in encoder.named_parameters())
            assert len(list(encoder.parameters())) == count
            for found, expected in zip(encoder(Y), before, strict=True):
                assert torch.equal(found, expected)


@pytest.mark.parametrize("Net", [ZeroImputation, PointNet, IndexNet, FactorNet])
def test_activations_are_those_asked_for(Net, Y):
    net = Net(D, Q, (6, 5), activation=nn.Tanh).to(Y.dtype)
    assert any(isinstance(module, nn.Tanh) for module in net.modules())
    assert not any(isinstance(module, nn.SiLU) for module in net.modules())
    assert all(value.isfinite().all() for value in net(Y))


@pytest.mark.parametrize("data_dim", [1, 50])
@pytest.mark.parametrize("init_scale", [1e-4, 0.3, 30.0])
@pytest.mark.parametrize("Net", [ZeroImputation, PointNet, IndexNet, FactorNet])
def test_scales_start_about_init_scale(Net, init_scale, data_dim, dtype):
    Y = torch.randn(20, data_dim, dtype=dtype)
    encoder = Net(data_dim, Q, init_scale=init_scale).to(dtype)
    assert ((encoder(Y)[1] / init_scale).log().abs() < 1).all()
    for parameter in encoder.parameters():
        parameter.data.zero_()
    loc, scale = encoder(Y)
    assert (loc == 0).all()
    torch.testing.assert_close(scale, torch.full_like(scale, init_scale))


def test_the_diagonal_of_scale_tril_starts_at_init_scale(dtype):
    encoder = ZeroImputation(D, Q, covariance="full", init_scale=0.3).to(dtype)
    for parameter in encoder.parameters():
        parameter.data.zero_()
    torch.testing.assert_close(encoder(torch.zeros(2, D, dtype=dtype))[1], 0.3 * torch.eye(Q, dtype=dtype).expand(2, Q, Q))


@pytest.mark.parametrize("Net", [ZeroImputation, PointNet, IndexNet, FactorNet])
class TestErrors:
    @pytest.mark.parametrize(
        ("name", "sizes"), [("data_dim", (0, Q, [5])), ("latent_dim", (D, 0, [5])), ("hidden_dims", (D, Q, [5, 0]))]
    )
    def test_sizes(self, Net, name, sizes):
        with pytest.raises(ValueError, match=f"expected {name} of 1 or more, got 0"):
            Net(*sizes)

    @pytest.mark.parametrize("init_scale", [0.0, -1.0, torch.inf, torch.nan])
    def test_init_scale(self, Net, init_scale):
        with pytest.raises(ValueError, match=f"positive and finite init_scale, got {init_scale}"):
            Net(D, Q, init_scale=init_scale)

    @pytest.mark.parametrize("shape", [(6, D + 1), (6, 1), (D, 6), ()])
    def test_shape_of_data(self, Net, shape, unchecked):
        with pytest.raises(ValueError, match=rf"shape \[\*, {D}\], got \[{', '.join(map(str, shape))}\]"):
            Net(D, Q)(torch.zeros(shape))

    def test_dtype_of_data(self, Net, unchecked):
        with pytest.raises(TypeError, match=r"expected data of torch.float32, .* call encoder.to\(torch.float64\)"):
            Net(D, Q)(torch.zeros(6, D, dtype=torch.float64))
        with pytest.raises(TypeError, match=r"expected data of torch.float32, .* got torch.int64; use y.to\(torch.float32\)"):
            Net(D, Q)(torch.zeros(6, D, dtype=torch.long))

    def test_what_is_no_tensor(self, Net, unchecked):
        for y in (np.zeros((6, D), dtype=np.float32), None):
            with pytest.raises(
                TypeError, match=r"expected data to be tensors, got (ndarray|NoneType); use pyro_lvgp.tables.as_tensor"
            ):
                Net(D, Q)(y)


def test_covariance_of_another_kind(unchecked):
    with pytest.raises(ValueError, match=r'expected covariance "diagonal" or "full", got \'diag\''):
        ZeroImputation(D, Q, covariance="diag")


@pytest.mark.parametrize("Net", [PointNet, IndexNet])
def test_feature_dim(Net):
    assert Net(D, Q, [7, 8], feature_dim=9).rho[0].in_features == 9
    with pytest.raises(ValueError, match="expected feature_dim of 1 or more, got 0"):
        Net(D, Q, feature_dim=0)


def test_as_pyro_module_keeps_outputs_and_makes_every_parameter_a_pyro_param(dtype):
    net = nn.Sequential(MLP(D, 2, [5]), nn.Linear(2, 2, bias=False), nn.BatchNorm1d(2)).to(dtype).eval()
    x = torch.randn(6, D, dtype=dtype)
    before, count = net(x), len(list(net.parameters()))
    assert as_pyro_module(as_pyro_module(net)) is net
    assert all(isinstance(module, PyroModule) for module in net.modules())
    assert torch.equal(net(x), before)
    names = [name for name, _ in net.named_parameters()]
    assert len(names) == count
    assert all(name.endswith("_unconstrained") for name in names)


@pytest.mark.parametrize("local", [True, False])
@pytest.mark.parametrize(
    ("Net", "options", "count"),
    [
        (ZeroImputation, {}, 4),
        (ZeroImputation, {"covariance": "full"}, 4),
        (PointNet, {}, 8),
        (IndexNet, {}, 8),
        (FactorNet, {}, 4),
    ],
)
def test_every_weight_trains_through_svi(local, Net, options, count):
    Y = torch.randn(8, D)
    Y[2, 1:] = torch.nan
    with pyro.settings.context(module_local_params=local):
        model = BayesianGPLVM(8, D, Q, num_inducing=4).initialize(Y)
        encoder = Net(D, Q, [5], **options)
        covariance = options.get("covariance", "diagonal")
        guide = MeanFieldGuide(model, covariance={"X": covariance}, encoders={"X": encoder})
        svi = SVI(model, guide, Adam({"lr": 0.1}), TraceMeanField_ELBO())
        svi.step(Y)
        before = {name: p.detach().clone() for name, p in encoder.named_parameters()}
        assert len(before) == count
        svi.step(Y)
        for name, parameter in encoder.named_parameters():
            assert not torch.equal(parameter, before[name]), name
