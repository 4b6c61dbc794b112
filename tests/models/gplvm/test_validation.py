"""Errors of the GPLVM."""

import numpy as np
import pytest
import torch

from pyro_lvgp.guides import MeanFieldGuide
from pyro_lvgp.kernels import RBF
from pyro_lvgp.likelihoods import Gaussian, Poisson
from pyro_lvgp.models import BayesianGPLVM
from tests.models.gplvm._models import D, M, N, Q, make_model

pytestmark = pytest.mark.usefixtures("float64")


def test_rows_outside_the_support_of_the_likelihood_are_refused():
    Y = torch.poisson(torch.full((12, D), 3.0))
    model = BayesianGPLVM(len(Y), D, 2, num_inducing=5, likelihood=Poisson()).initialize(Y)
    guide = MeanFieldGuide(model)
    guide(Y)
    for value, message in ((-5.0, "expected counts 0, 1, …, got -5"), (torch.inf, "expected finite entries")):
        new = Y.index_put((torch.tensor(0), torch.tensor(1)), torch.tensor(value))
        for use in (model.infer_latents, model.reconstruct, model.impute):
            with pytest.raises(ValueError, match=message):
                use(guide, new)


@pytest.mark.usefixtures("unchecked")
class TestBadInput:
    @pytest.mark.parametrize(
        ("options", "error", "match"),
        [
            ({"likelihood": "gaussian"}, TypeError, r"expected a likelihood, got 'gaussian'; make one, such as Gaussian\(\)"),
            ({"likelihood": Gaussian}, TypeError, "expected a likelihood, got <class"),
            ({"likelihood": Gaussian(0.1, data_dim=D + 1)}, ValueError, f"of {D} outputs, got one with {D + 1} parameters"),
            (
                {"kernel": RBF(Q, batch_shape=(4,))},
                ValueError,
                r"for all outputs, got a kernel of batch shape \[4\]",
            ),
            ({"kernel": RBF(Q + 1)}, ValueError, f"expected X with {Q + 1} columns, got {Q}; make the kernel by RBF"),
            ({"kernel": 1.0 + RBF(Q) * RBF(Q + 1)}, ValueError, f"expected X with {Q + 1} columns, got {Q}"),
            ({"kernel": RBF(1, active_dims=[Q])}, ValueError, f"expected X with at least {Q + 1} columns, got {Q}"),
        ],
    )
    def test_parts_that_do_not_fit(self, options, error, match):
        with pytest.raises(error, match=match):
            BayesianGPLVM(N, D, Q, num_inducing=M, **options)

    def test_new_rows_without_latents(self, Y):
        model = make_model().initialize(Y)
        guide = MeanFieldGuide(model)
        guide(Y)
        with pytest.raises(ValueError, match=r"got 5 rows and no idx; .* impute\(guide, Y, latents=model.infer_latents"):
            model.impute(guide, Y[:5] + 1.0)

    def test_latents_of_another_kind(self, Y):
        with pytest.raises(TypeError, match=r"expected data to be tensors, got list; use pyro_lvgp.tables.as_tensor"):
            make_model().initialize(Y, latents=[[0.0] * Q] * N)

    def test_no_latents_to_predict_at(self, Y):
        model = make_model()
        guide = MeanFieldGuide(model)
        guide(Y)
        with pytest.raises(ValueError, match="expected X with one row or more, got none"):
            model.predict(guide, torch.zeros(0, Q))

    @pytest.mark.parametrize(
        ("X", "error", "match"),
        [
            (np.full((2, Q), "x"), ValueError, "expected X to be a table of numbers, got ndarray"),
            (torch.zeros(2, Q).float(), TypeError, "expected X of the model's dtype torch.float64, got torch.float32"),
            (torch.zeros(2, Q + 1).double(), ValueError, rf"expected X of shape \[rows, {Q}\], got \[2, {Q + 1}\]"),
            (torch.full((2, Q), torch.nan).double(), ValueError, r"expected finite latents, .* infer_latents\(...\)"),
        ],
    )
    def test_latents_to_predict_at(self, X, error, match, unchecked):
        model = make_model()
        guide = MeanFieldGuide(model)
        guide()
        for predict in (model.predict, model.predictive):
            with pytest.raises(error, match=match):
                predict(guide, X)

    @pytest.mark.parametrize(
        ("bad", "error", "match"),
        [
            (lambda Y: Y[:, :2], ValueError, r"shape \[rows, 3\], got \[12, 2\]"),
            (lambda Y: Y[0], ValueError, r"got \[3\]"),
            (lambda Y: Y[:0], ValueError, "one row or more, got none"),
            (lambda Y: Y[:5], ValueError, "mini-batch with its indices"),
            (lambda Y: Y.numpy(), TypeError, "pyro_lvgp.tables.as_tensor"),
            (lambda Y: Y.long(), TypeError, r"floating-point .* got torch.int64; use .float\(\)"),
            (lambda Y: Y.half(), TypeError, r"torch.float32 or torch.float64, got torch.float16; use .float\(\)"),
            (lambda Y: Y.float(), TypeError, "model's dtype torch.float64, got torch.float32"),
            (lambda Y: Y.to("meta"), ValueError, "device"),
            (lambda Y: torch.where(Y[3, 1] == Y, torch.inf, Y), ValueError, r"got inf at y\[3, 1\]"),
        ],
    )
    def test_forward(self, Y, bad, error, match):
        with pytest.raises(error, match=match):
            make_model()(bad(Y))

    @pytest.mark.parametrize(
        ("idx", "error", "match"),
        [
            (torch.tensor([0, 12]), IndexError, r"0…11, got 0…12"),
            (torch.tensor([-1, 2]), IndexError, r"got -1…2"),
            (torch.tensor([0]), ValueError, "one index for each of 2 rows"),
            (torch.tensor([0.0, 1.0]), ValueError, "torch.long"),
        ],
    )
    def test_index(self, Y, idx, error, match):
        with pytest.raises(error, match=match):
            make_model()(Y[:2], idx)

    def test_row_or_column_all_missing(self, Y):
        for row in (True, False):
            holes = Y.clone()
            holes[(4, slice(None)) if row else (slice(None), 1)] = torch.nan
            with pytest.raises(ValueError, match="row 4" if row else "column 1"):
                make_model().initialize(holes)

    def test_negative_count(self, Y):
        with pytest.raises(ValueError, match="expected counts"):
            make_model(likelihood=Poisson())(-Y.abs().ceil() - 1)

    def test_sizes(self):
        with pytest.raises(ValueError, match="num_inducing=4 or fewer"):
            BayesianGPLVM(4, 2, 1, num_inducing=5)
        with pytest.raises(ValueError, match="latent_dim of 1 or more"):
            BayesianGPLVM(4, 2, 0, num_inducing=2)
        with pytest.raises(ValueError, match="likelihood_term"):
            make_model(likelihood_term="vfe")

    def test_methods_check_too(self, Y):
        model = make_model()
        guide = MeanFieldGuide(model)
        guide(Y)
        with pytest.raises(ValueError, match=r"\[rows, 3\]"):
            model.infer_latents(guide, Y[:, :1])
        with pytest.raises(ValueError, match="indices"):
            model.reconstruct(guide, Y[:3])
