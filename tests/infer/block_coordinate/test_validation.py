"""Errors of blocks and of their updates."""

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import Trace_ELBO, TraceEnum_ELBO, config_enumerate
from torch.distributions import constraints

from pyro_lvgp.infer import Block, BlockCoordinateVI
from tests.infer.block_coordinate._regression import Guide, Model, Q, adam, data, guide, model

pytestmark = pytest.mark.usefixtures("float64")


def test_guides_with_discrete_sites_are_told_of_other_bounds():
    def model():
        pyro.sample("z", dist.Bernoulli(0.5))

    def guide():
        pyro.sample("z", dist.Bernoulli(pyro.param("p", torch.tensor(0.3), constraint=constraints.unit_interval)))

    blocks = [Block("p", params=["p"], optimizer=adam())]
    with pytest.raises(NotImplementedError, match="fully reparameterized") as error:
        BlockCoordinateVI(model, guide, blocks).step()
    assert "Pass loss=Trace_ELBO() or TraceEnum_ELBO()" in error.value.__notes__[0]
    BlockCoordinateVI(model, guide, blocks, loss=Trace_ELBO()).step()
    BlockCoordinateVI(model, config_enumerate(guide), blocks, loss=TraceEnum_ELBO()).step()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({}, r"block 'precision': expected update to return values of \['guide.precision'\], got \[\]"),
        ({"guide.precision": torch.ones(1)}, r"'guide.precision' of shape \[3\], got \[1\]"),
        ({"guide.precision": torch.tensor([1.0, -1.0, 1.0])}, "'guide.precision' in GreaterThan"),
        ({"guide.precision": torch.tensor([1.0, torch.nan, 1.0])}, "'guide.precision' in GreaterThan"),
        ({"guide.precision": torch.tensor([1.0, 0.0, 1.0])}, "'guide.precision' in GreaterThan"),
        ({"guide.precision": torch.tensor([1.0, torch.inf, 1.0])}, "'guide.precision' in GreaterThan"),
    ],
)
def test_unfit_values_are_refused(values, message):
    m, g = Model(), Guide()
    blocks = [
        Block("rest", params=["model.noise", "guide.w.*"], optimizer=adam()),
        Block("precision", params=["guide.precision"], update=lambda X, y: values),
    ]
    with pytest.raises(ValueError, match=message):
        BlockCoordinateVI(m, g, blocks).step(*data())
    torch.testing.assert_close(g.precision.detach(), torch.ones(Q))


@pytest.mark.parametrize(
    ("constraint", "good", "bad"),
    [
        # Symmetric up to rounding in single precision.
        (constraints.positive_definite, [[1e4, 0.1], [0.1001, 1.0]], [[1.0, 2.0], [2.0, 1.0]]),
        (constraints.positive_definite, [[2.0, 1.0], [1.0, 2.0]], [[2.0, 1.0], [0.0, 2.0]]),
        (constraints.lower_cholesky, [[1.0, 0.0], [-1.0, 2.0]], [[1.0, 0.0], [-1.0, -2.0]]),
        (constraints.simplex, [0.2, 0.3, 0.5], [0.2, 0.3, 0.6]),
        (constraints.unit_interval, [0.1, 0.9], [0.1, 1.1]),
        (constraints.real, [-torch.inf, 0.0], [torch.nan, 0.0]),
        (constraints.positive, [], None),
    ],
    ids=["rounding", "symmetric", "triangular", "simplex", "interval", "infinite", "empty"],
)
def test_values_must_fit_the_constraint_up_to_rounding(constraint, good, bad):
    good = torch.tensor(good, dtype=torch.float32)

    def guide():
        start = torch.eye(2) if good.dim() == 2 else torch.full_like(good, 1.0 / max(len(good), 1))
        pyro.param("x", start.float(), constraint=constraint)

    def step(value):
        BlockCoordinateVI(lambda: None, guide, [Block("x", params=["x"], update=lambda: {"x": value})]).step()

    step(good)
    torch.testing.assert_close(pyro.param("x").detach(), good, atol=1e-3, rtol=1e-5)
    if bad is not None:
        with pytest.raises(ValueError, match="'x' in "):
            step(torch.tensor(bad, dtype=torch.float32))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"optimizer": adam()}, "expected a list of patterns"),
        ({"params": "guide.*", "optimizer": adam()}, "expected a list of patterns"),
        ({"params": ["*"]}, "neither"),
        ({"params": ["*"], "optimizer": adam(), "update": dict}, "both"),
        ({"params": ["*"], "optimizer": adam(), "num_steps": 0}, "at least 1, got 0"),
        ({"params": ["*"], "update": dict, "num_steps": 2}, "expected num_steps and loss for gradients alone"),
        ({"params": ["*"], "update": dict, "loss": Trace_ELBO()}, "expected num_steps and loss for gradients alone"),
        ({"params": ["*"], "optimizer": adam(), "damping": 0.5}, "expected no damping beside optimizer, got 0.5"),
        ({"params": ["*"], "update": dict, "damping": 0.0}, r"damping in \(0, 1\], got 0.0"),
    ],
)
def test_settings_of_blocks_are_checked(settings, message):
    with pytest.raises(ValueError, match=f"block 'b': .*{message}"):
        Block("b", **settings)


@pytest.mark.parametrize("values", [None, {"guide.precision": 1.0}])
def test_updates_return_tensors_by_name(values):
    blocks = [
        Block("rest", params=["model.noise", "guide.w.*"], optimizer=adam()),
        Block("precision", params=["guide.precision"], update=lambda X, y: values),
    ]
    with pytest.raises(TypeError, match="block 'precision': expected update to return tensors by name, got"):
        BlockCoordinateVI(Model(), Guide(), blocks).step(*data())


@pytest.mark.usefixtures("unchecked")
def test_kinds_of_arguments_are_checked():
    m, g = Model(), Guide()
    with pytest.raises(TypeError, match=r"each a Block\(...\), got \['str'\]"):
        BlockCoordinateVI(m, g, ["all"])
    blocks = [Block("all", params=["*"], optimizer=pyro.optim.Adam({"lr": 0.1}))]
    with pytest.raises(TypeError, match=r"got the class Trace_ELBO; pass Trace_ELBO\(\)"):
        BlockCoordinateVI(m, g, blocks, loss=Trace_ELBO)
    with pytest.raises(TypeError, match="block 'all': expected optimizer to make a torch optimiser of tensors, got NoneType"):
        BlockCoordinateVI(m, g, blocks).step(*data())


@pytest.mark.parametrize("names", [[], ["a", "a"]])
def test_names_of_blocks_are_checked(names):
    with pytest.raises(ValueError, match="each with a name of its own"):
        BlockCoordinateVI(model, guide, [Block(name, params=["*"], optimizer=adam()) for name in names])


def test_a_schedule_out_of_range_is_refused():
    m, g = Model(), Guide()
    block = Block("all", params=["*"], update=dict, damping=lambda sweep: 2.0)
    with pytest.raises(ValueError, match=r"block 'all': expected damping in \(0, 1\], got 2.0"):
        BlockCoordinateVI(m, g, [block]).step(*data())
