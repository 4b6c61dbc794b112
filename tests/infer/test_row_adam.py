import pytest
import torch

from pyro_lvgp.infer import RowAdam

N, Q = 7, 3


def sparse(rows, gradient):
    return torch.sparse_coo_tensor(rows[None], gradient, (N, Q), check_invariants=True)


def test_each_row_moves_as_under_adam_with_the_steps_that_use_it(float64):
    start, rows = torch.randn(N, Q), torch.rand(30, N).argsort(1)[:, :3]
    gradients = torch.randn(30, 3, Q)
    together = start.clone().requires_grad_()
    optim = RowAdam([together], lr=0.1)
    for index, gradient in zip(rows, gradients, strict=True):
        together.grad = sparse(index, gradient)
        optim.step()
    for n in range(N):
        alone = start[n].clone().requires_grad_()
        adam = torch.optim.Adam([alone], lr=0.1)
        for gradient in gradients[rows == n]:
            alone.grad = gradient
            adam.step()
        torch.testing.assert_close(together[n], alone)


def test_entries_of_one_row_add_up(float64):
    twice, once = (torch.zeros(N, Q, requires_grad=True) for _ in range(2))
    gradient = torch.randn(2, Q)
    twice.grad = sparse(torch.tensor([4, 4]), gradient)
    once.grad = sparse(torch.tensor([4]), gradient.sum(0, keepdim=True))
    for param in (twice, once):
        RowAdam([param], lr=0.1).step()
    torch.testing.assert_close(twice, once)


def test_dense_gradients_are_those_of_adam_also_after_sparse_ones(float64):
    params = [torch.zeros(N, Q, requires_grad=True) for _ in range(2)]
    optims = [RowAdam(params[:1], lr=0.1), torch.optim.Adam(params[1:], lr=0.1)]
    for step in range(6):
        gradient = torch.randn(N, Q)
        for param, optim in zip(params, optims, strict=True):
            param.grad = gradient.clone()
            if param is params[0] and 2 <= step < 4:
                param.grad = sparse(torch.arange(N), gradient)
            optim.step()
    torch.testing.assert_close(*params)


def test_options_that_have_no_sparse_form_are_refused():
    param = torch.zeros(N, Q, requires_grad=True)
    param.grad = sparse(torch.tensor([1]), torch.ones(1, Q))
    with pytest.raises(ValueError, match="no weight_decay"):
        RowAdam([param], weight_decay=0.1).step()
