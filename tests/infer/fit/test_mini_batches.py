"""Mini-batches."""

import re

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer.autoguide import AutoNormal

from pyro_lvgp.infer import fit
from tests.helpers.fits import Climb
from tests.infer.fit._models import N, make_pair, regression


class _Sharing:
    """A model whose inputs serve all rows of the data."""

    def __init__(self, model):
        self.model = model

    def __call__(self, *args):
        self.model(*args)

    def mini_batch(self, idx, x, y):
        return x, y[idx], idx


@pytest.mark.parametrize(("batch_size", "per_epoch"), [(5, 4), (6, 3), (N, 1)])
def test_mini_batches_without_replacement(batch_size, per_epoch):
    y, labels, spy = torch.randn(N, 2), torch.arange(N), Climb()
    spy.fit(y, labels, batch_size=batch_size, num_steps=3 * per_epoch)
    orders = []
    for epoch in range(3):
        rows = spy.batches[epoch * per_epoch : (epoch + 1) * per_epoch]
        for batch, label, idx in rows:
            assert len(idx) == batch_size
            assert torch.equal(batch, y[idx])
            assert torch.equal(label, labels[idx])
        orders.append(torch.cat([idx for *_, idx in rows]).tolist())
        assert len(set(orders[-1])) == per_epoch * batch_size
    if batch_size == N:  # by which Pyro indexes no parameters
        assert orders == 3 * [list(range(N))]
    else:
        assert orders[0] != orders[1] != orders[2]


def test_mini_batches_as_the_model_takes_them():
    x, y, spy = torch.randn(3, 1), torch.randn(N, 3, 2), Climb()
    spy.model = _Sharing(spy.model)
    spy.fit(x, y, batch_size=5)
    for inputs, batch, idx in spy.batches:
        assert inputs is x
        assert torch.equal(batch, y[idx])
    assert torch.cat([idx for *_, idx in spy.batches]).sort().values.tolist() == list(range(N))


@pytest.mark.parametrize("batch_size", [0, N + 1])
def test_batch_size_out_of_range(Y, batch_size):
    with pytest.raises(ValueError, match=f"from 1 to {N}, the rows of the data, got {batch_size}"):
        Climb().fit(Y, batch_size=batch_size)


def test_mini_batches_need_data():
    with pytest.raises(ValueError, match="from 1 to 0"):
        Climb().fit(batch_size=2)


def test_tensors_of_other_lengths_have_no_mini_batches():
    for other in (torch.zeros(2 * N), torch.tensor(3)):
        found = re.escape(f"got shapes [{list(other.shape)}, [{N}]]")
        with pytest.raises(ValueError, match=f"expected {N} rows in each tensor, .* {found}"):
            fit(regression, lambda *_: None, other, torch.zeros(N), batch_size=5, progress=False)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(("num", "num_entries"), [(N, N), (None, 1)])
def test_numbers_beside_the_data(num, num_entries):
    def model(y, sd):
        loc = pyro.sample("loc", dist.Normal(0.0, sd))
        with pyro.plate("data", y.numel()):
            pyro.sample("y", dist.Normal(loc, 1.0), obs=y)

    y = torch.tensor(2.0) if num is None else torch.full((num,), 2.0)
    history = fit(model, AutoNormal(model), y, torch.tensor(3.0), num_steps=2, progress=False)
    assert history.num_entries == num_entries


@pytest.mark.usefixtures("unchecked")
def test_whole_numbers_are_data_of_a_model_of_your_own():
    def counts(k, idx=None):
        rate = pyro.sample("rate", dist.Gamma(2.0, 1.0))
        with pyro.plate("rows", N, subsample=idx):
            pyro.sample("k", dist.Poisson(rate), obs=k)

    guide = AutoNormal(counts, create_plates=lambda k, idx=None: pyro.plate("rows", N, subsample=idx))
    history = fit(counts, guide, torch.arange(N), num_steps=3, batch_size=np.int64(5), progress=False)
    assert len(history.losses) == 3
    assert history.num_entries == N


def test_a_batch_of_all_rows_is_a_full_batch(Y):
    losses = []
    for batch_size in (None, N):
        pyro.clear_param_store()
        losses.append(fit(*make_pair(Y), Y, num_steps=5, batch_size=batch_size, progress=False).losses)
    assert losses[0] == pytest.approx(losses[1])
