"""State of a guide that was conditioned on data."""

import io

import pyro
import pytest
import torch

from pyro_lvgp.infer import MeanFieldELBO, fit
from tests.helpers.sparse_processes import B, M, assert_close, data, function, make, one_and_several

pytestmark = pytest.mark.usefixtures("float64")


def test_memory_is_saved_and_carried_on():
    model, guide = make()
    x, y = data()
    nothing = torch.full_like(y, torch.nan)
    guide(x, y)
    file = io.BytesIO()
    torch.save(guide.condition(x, y, inducing_points=torch.rand(7, 1))._asdict(), file)
    expected = function(guide, x, nothing)
    guide.restore(None)
    model.inducing_points = model.inducing_points.detach()[:2]
    guide.restore(type(guide.condition(x, nothing))(**torch.load(io.BytesIO(file.getvalue()))))
    assert_close(function(guide, x, nothing), expected)
    guide.condition(x[:1], y[:1])
    assert not torch.equal(function(guide, x, nothing)[0], expected[0])


@pytest.mark.parametrize("first", ["model", "guide"])
def test_memory_is_part_of_the_guide_s_state(first):
    model, guide = make()
    x, y = data()
    nothing = torch.full_like(y, torch.nan)
    guide(x, y)
    guide.condition(x, y, inducing_points=torch.rand(7, 1))
    expected = function(guide, x, nothing)
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "guide": guide.state_dict()}, file)
    pyro.clear_param_store()
    model, guide = make()
    guide(x, y)
    state = torch.load(io.BytesIO(file.getvalue()))
    modules = {"model": model, "guide": guide}
    for name in (first, *(modules.keys() - {first})):  # either moves the model's inducing points
        modules[name].load_state_dict(state[name])
    assert_close(function(guide, x, nothing), expected)
    history = fit(model, guide, x, y, loss=MeanFieldELBO("points"), num_steps=1, progress=False)
    assert len(history.losses) == 1


@pytest.mark.parametrize("trained", [True, False])
def test_inducing_points_are_held_wherever_they_go(trained):
    model, guide = make()
    other, _ = make(Z=torch.rand(M + 1, 1))
    model.inducing_points_unconstrained.requires_grad_(trained)
    x, y = data()
    guide(x, y)
    guide.condition(x, y)
    memory = guide.condition(x, y, inducing_points=torch.rand(7, 1))
    state = guide.state_dict()
    for move in (
        lambda: guide.restore(memory),
        lambda: guide.load_state_dict(state),
        lambda: model.load_state_dict(other.state_dict()),
    ):
        assert model.inducing_points_unconstrained.requires_grad == trained
        move()
    assert len(model.inducing_points) == M + 1
    assert model.inducing_points_unconstrained.requires_grad == trained


@one_and_several
def test_inducing_points_that_leave_the_memory_are_refused(series):
    model, guide = make()
    x, y = data(*series)
    guide(x, y)
    guide.condition(x, y)
    expected = function(guide, x, y)
    for moved in (model.inducing_points.detach() + 0.1, torch.rand(M + 1, 1)):
        model.inducing_points = moved
        for use in (guide, guide.condition):
            with pytest.raises(ValueError, match=r"guide's memory in the model, got others; restore them by guide.restore"):
                use(x, y)
        guide.restore(guide.memory)
        assert_close(function(guide, x, y), expected)


@pytest.mark.parametrize("compiled", [False, "torchscript"])
def test_fits_move_no_inducing_points_that_carry_a_memory(compiled):
    """Nor where Pyro's validation is off, as it is after the first step."""
    model, guide = make()
    x, y = data()
    options = {"loss": MeanFieldELBO("points"), "num_steps": 3, "compile": compiled, "progress": False}
    guide(x, y)
    guide.condition(x, y)
    with pytest.raises(ValueError, match=r"others; restore them by guide.restore\(guide.memory\), freeze them by requires"):
        fit(model, guide, x, y, **options)
    guide.restore(guide.memory)
    model.inducing_points_unconstrained.requires_grad_(False)
    assert len(fit(model, guide, x, y, **options).losses) == 3


def test_memory_changes_precision_with_the_guide():
    model, guide = make()
    x, y = data()
    nothing = torch.full_like(y, torch.nan)
    guide(x, y)
    memory = guide.condition(x, y)
    expected = function(guide, x, nothing)
    for module in (model, guide):
        module.float()
    assert {part.dtype for part in guide.memory} == {torch.float32}
    mean, variance = function(guide, x.float(), nothing.float())
    assert mean.dtype == torch.float32
    assert_close([mean.double(), variance.double()], expected, atol=1e-3)
    guide.restore(memory)  # of the old precision
    assert {part.dtype for part in guide.memory} == {torch.float32}


@pytest.mark.parametrize(
    ("inducing_points", "message"),
    [
        (torch.linspace(0.0, 1.0, 4), r"laid out as the model's \[5, 1\], got \[4\]; a single column"),
        (torch.full((4, 1), torch.nan), "finite inducing points"),
        (torch.rand(4, 2), r"\[5, 1\], got \[4, 2\]"),
        (torch.rand(0, 1), r"\[5, 1\], got \[0, 1\]"),
    ],
)
def test_what_does_not_fit_leaves_the_guide_as_it_was(inducing_points, message, unchecked):
    _, guide = make()
    x, y = data()
    guide(x, y)
    guide.condition(x, y)
    expected = function(guide, x, y)
    with pytest.raises(ValueError, match=message):
        guide.condition(x, y, inducing_points=inducing_points.double())
    with pytest.raises(ValueError, match=r"expected finite entries.*got inf at y\[3, 1\]"):
        guide.condition(x, y.index_put((torch.tensor(3), torch.tensor(1)), torch.tensor(torch.inf)))
    for wrong in (torch.nan, torch.inf):
        with pytest.raises(ValueError, match="expected finite inputs"):
            guide.condition(x.index_put((torch.tensor(3),), torch.tensor(wrong)), y)
    with pytest.raises(ValueError, match=r"expected inputs \[points, columns\] and data"):
        guide.condition(x, y[:1])
    with pytest.raises(ValueError, match=message):
        guide.restore(guide.memory._replace(inducing_points=inducing_points.double()))
    assert_close(function(guide, x, y), expected)


def test_remembered_series_keep_their_order():
    _, guide = make(num_data=B)
    x, y = data(B)
    guide(x, y)
    guide.condition(x, y)
    idx = torch.tensor([1, 0, 2])
    for use in (guide, guide.condition):
        with pytest.raises(ValueError, match="than the 3 of plate 'series', or all of them in order"):
            use(x[idx], y[idx], idx)


def test_remembered_series_come_all_together():
    _, guide = make(num_data=B)
    x, y = data(B)
    guide(x, y)
    guide.condition(x, y)
    idx = torch.tensor([0, 2])
    with pytest.raises(ValueError, match=r"expected the 3 series of the guide's memory, got \[2\]"):
        guide(x[idx], y[idx], idx)
