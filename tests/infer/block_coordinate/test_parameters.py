"""Parameters and sites of each block."""

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer.autoguide import AutoNormal
from pyro.nn import PyroModule, PyroParam
from torch import nn
from torch.distributions import constraints

from pyro_lvgp.guides import MeanFieldGuide
from pyro_lvgp.infer import Block, BlockCoordinateVI, MeanFieldELBO
from pyro_lvgp.models import BayesianGPLVM
from tests.infer.block_coordinate._regression import Guide, Model, adam, data, exact_loss, precision_update

pytestmark = pytest.mark.usefixtures("float64")


@pytest.mark.usefixtures("_local")
def test_blocks_in_any_module_find_their_parameters():
    args, m, g = data(), Model(), Guide()
    blocks = [
        Block("noise", params=["model.*"], optimizer=adam()),
        Block("mean", sites=["w"], optimizer=adam()),
        Block("precision", params=["guide.precision"], update=lambda X, y: precision_update(X, y, m.noise)),
    ]
    vi = BlockCoordinateVI(m, g, blocks, loss=exact_loss)
    losses = [vi.step(*args) for _ in range(300)]
    assert losses[-1] < losses[0] - 5.0
    # At the optimum no gradient is left.
    slopes = torch.autograd.grad(exact_loss(m, g, *args), [*m.parameters(), *g.parameters()])
    for slope in slopes:
        torch.testing.assert_close(slope, torch.zeros_like(slope), rtol=0.0, atol=1e-3)


def test_orphans_overlaps_and_idle_patterns_are_named():
    blocks = [
        Block("one", params=["model.noise", "guide.w.*"], optimizer=adam()),
        Block("two", params=["model.*", "guide.w"], sites=["v"], optimizer=adam()),
    ]
    with pytest.raises(ValueError, match="exactly one block") as error:
        BlockCoordinateVI(Model(), Guide(), blocks).step(*data())
    for fault in (
        "pattern 'guide.w' of block 'two' matches none",
        "site 'v' of block 'two' matches none",
        "'guide.precision' is in no block",
        "'model.noise' is in blocks ['one', 'two']",
    ):
        assert fault in str(error.value)


def test_sites_are_the_guide_s():
    class OwnModel(Model):
        def __init__(self):
            super().__init__()
            self.w = PyroModule()
            self.w.noise = PyroParam(torch.tensor(1.0))

    blocks = [Block("w", sites=["w"], optimizer=adam()), Block("precision", params=["guide.precision"], optimizer=adam())]
    with pytest.raises(ValueError, match=r"got: 'model.noise' is in no block; 'model.w.noise' is in no block\."):
        BlockCoordinateVI(OwnModel(), Guide(), blocks).step(*data())


@pytest.mark.usefixtures("_local")
def test_sites_of_an_autoguide():
    m = Model()
    g = AutoNormal(m)
    blocks = [Block("w", sites=["w"], optimizer=adam()), Block("noise", params=["model.noise"], optimizer=adam())]
    BlockCoordinateVI(m, g, blocks).step(*data())
    assert (g.locs.w != 0.0).all()
    assert m.noise != 0.5


def test_plain_modules_inside_do_not_warn():
    class Amortised(PyroModule):
        def __init__(self):
            super().__init__()
            self.net = nn.Linear(1, 2)
            self.scale = PyroParam(torch.tensor(1.0), constraints.positive)

        def forward(self, y):
            loc = self.net(y.mean().reshape(1))[0]
            pyro.sample("x", dist.Normal(loc, self.scale))

    def one(y):
        x = pyro.sample("x", dist.Normal(0.0, 1.0))
        with pyro.plate("data", len(y)):
            pyro.sample("y", dist.Normal(x, 1.0), obs=y)

    g = Amortised()
    weight = g.net.weight.clone()
    blocks = [Block("net", params=["guide.net.*"], optimizer=adam()), Block("scale", params=["guide.scale"], optimizer=adam())]
    vi = BlockCoordinateVI(one, g, blocks)
    for _ in range(2):
        vi.step(torch.ones(5))
    assert not torch.equal(g.net.weight[0], weight[0])


def test_a_shared_parameter_goes_by_its_name_in_the_model():
    m, g = Model(), Guide()
    g.model = m
    blocks = [Block("noise", params=["model.noise"], optimizer=adam()), Block("rest", params=["guide.*"], optimizer=adam())]
    BlockCoordinateVI(m, g, blocks).step(*data())


def test_parameters_that_are_replaced_are_noticed():
    m, g = Model(), Guide()
    vi = BlockCoordinateVI(m, g, [Block("all", params=["*"], optimizer=adam())])
    vi.step(*data())
    store = pyro.get_param_store()
    store["noise"] = torch.tensor(0.3)
    with pytest.raises(RuntimeError, match=r"new tensors for \['noise'\]"):
        vi.step(*data())


def test_blocks_of_a_latent_variable_model():
    Y = torch.randn(20, 4)
    gplvm = BayesianGPLVM(20, 4, 2, num_inducing=5)
    g = MeanFieldGuide(gplvm)
    blocks = [
        Block("latents", sites=["X"], optimizer=adam(0.05), num_steps=2),
        Block("inducing outputs", sites=["u"], optimizer=adam(0.05)),
        Block("model", params=["model.*"], optimizer=adam(0.02)),
    ]
    vi = BlockCoordinateVI(gplvm, g, blocks, loss=MeanFieldELBO())
    idx = torch.arange(10)
    losses = [vi.step(Y[idx], idx) for _ in range(10)]
    assert sum(losses[-3:]) < sum(losses[:3])


def test_a_name_with_brackets_is_itself_before_it_is_a_pattern():
    def model():
        pyro.sample(
            "y",
            dist.Normal(pyro.param("s[0]", torch.tensor(1.0)) + pyro.param("s0", torch.tensor(2.0)), 1.0),
            obs=torch.zeros(()),
        )

    blocks = [Block(name, params=[name], optimizer=adam()) for name in ("s[0]", "s0")]
    vi = BlockCoordinateVI(model, lambda: None, blocks)
    vi.step()
    assert pyro.param("s[0]") < 1.0
    assert pyro.param("s0") < 2.0
