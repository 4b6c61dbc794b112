"""Errors of arguments and data."""

import pytest
import torch
from pyro.infer import Trace_ELBO

from pyro_lvgp.guides import MeanFieldGuide
from pyro_lvgp.infer import Callback, fit
from tests.infer.fit._models import N, make_pair


@pytest.mark.usefixtures("unchecked")
def test_arguments_of_another_kind(Y):
    model, guide = make_pair(Y)
    with pytest.raises(TypeError, match=r"expected data to be tensors, got ndarray; use pyro_lvgp.tables.as_tensor"):
        fit(lambda y: model(y), guide, Y.numpy(), progress=False)
    with pytest.raises(ValueError, match=r"expected Y to be a table of numbers, got str"):
        fit(model, guide, "Y", progress=False)
    for args in ((), (Y, torch.arange(N))):
        with pytest.raises(TypeError, match=rf"expected all data \(Y\), got {len(args)} tensor\(s\)"):
            fit(model, guide, *args, progress=False)
    with pytest.raises(TypeError, match=r"got the class MeanFieldGuide; make one: MeanFieldGuide\(...\)"):
        fit(model, MeanFieldGuide, Y, progress=False)
    with pytest.raises(TypeError, match="got MeanFieldGuide, which is a guide, as the model; swap the two"):
        fit(guide, model, Y, progress=False)
    with pytest.raises(TypeError, match=r"expected loss to be a bound, got <class .*Trace_ELBO'>; make one"):
        fit(model, guide, Y, loss=Trace_ELBO, progress=False)
    for callbacks in ([True], Callback(), [Callback]):
        with pytest.raises(TypeError, match=r"expected callbacks to be a list, each a Callback, got .*; give callbacks=\["):
            fit(model, guide, Y, callbacks=callbacks, progress=False)
    with pytest.raises(TypeError, match=r"expected optim to be a Pyro optimiser or a list of blocks, got type; use Joint"):
        fit(model, guide, Y, optim=torch.optim.Adam, progress=False)
    with pytest.raises(TypeError, match=r"each a Block\(...\), got \['str'\]"):
        fit(model, guide, Y, optim=["all"], progress=False)
    with pytest.raises(ValueError, match="expected num_steps of 0 or more, got -1"):
        fit(model, guide, Y, num_steps=-1, progress=False)
    for name in ("num_steps", "batch_size"):
        with pytest.raises(TypeError, match=f"expected {name} to be an integer, got 5.0"):
            fit(model, guide, Y, progress=False, **{name: 5.0})


def test_data_unfit_for_the_model(Y):
    model, guide = make_pair(Y)
    with pytest.raises(ValueError, match="row 3"):
        fit(model, guide, Y.index_fill(0, torch.tensor(3), torch.nan), num_steps=1, progress=False)
