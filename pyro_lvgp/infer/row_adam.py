"""Adam for parameters of which a step uses some rows."""

from typing import Any

import torch
from torch import Tensor
from torch.optim import Adam

__all__ = ["RowAdam"]


class RowAdam(Adam):
    r"""Adam that changes only the rows with a gradient, where the gradient of a parameter is sparse.

    Each row has its own moments and number of steps, so that it moves as under Adam with the gradients of those steps alone
    that use it:

    .. math::

        t_n \leftarrow t_n + 1, \quad m_n \leftarrow \beta_1 m_n + (1 - \beta_1) g_n, \quad
        v_n \leftarrow \beta_2 v_n + (1 - \beta_2) g_n^2, \quad
        \theta_n \leftarrow \theta_n - \eta\, \frac{m_n / (1 - \beta_1^{t_n})}{\sqrt{v_n / (1 - \beta_2^{t_n})} + \epsilon} .

    The time of a step is in proportion to the rows in use.  Under ``torch.optim.Adam`` rows that a step does not use move too,
    along their old moments.  ``torch.optim.SparseAdam`` counts steps for all rows together, so that the first step of a row is
    up to three times as long as the learning rate.

    Parameters with dense gradients are those of ``torch.optim.Adam``, whose arguments are those of this class;
    ``weight_decay``, ``amsgrad`` and ``maximize`` are not supported for sparse gradients.

    :raises ValueError: in ``step``, for a sparse gradient with one of these options.

    >>> rows = torch.zeros(3, 2, requires_grad=True)
    >>> optim = RowAdam([rows], lr=0.1)
    >>> rows.grad = torch.sparse_coo_tensor([[1]], torch.ones(1, 2), (3, 2), check_invariants=True)
    >>> optim.step()
    >>> rows[:, 0].detach()
    tensor([ 0.0000, -0.1000,  0.0000])

    Source: Kingma and Ba (2015), "Adam: a method for stochastic optimization".
    """

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Take a step.

        :param closure: function that evaluates the loss and its gradients.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        by_row: list[tuple[Tensor, Tensor]] = []
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None and (param.grad.is_sparse or _counts_rows(self.state.get(param), param)):
                    by_row.append((param, param.grad))
                    self._step_rows(param, group)
                    param.grad = None
        super().step()
        for param, gradient in by_row:
            param.grad = gradient
        return loss

    def _step_rows(self, param: Tensor, group: dict[str, Any]) -> None:
        if group["weight_decay"] or group["amsgrad"] or group["maximize"]:
            raise ValueError("expected no weight_decay, amsgrad or maximize of RowAdam for sparse gradients, got one of them")
        state, gradient = self.state[param], param.grad
        if not state:
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(param), torch.zeros_like(param)
        steps = state.get("step", torch.zeros(()))
        if steps.numel() != len(param):
            state["step"] = steps.to(param).reshape(1).repeat(len(param))
        assert gradient is not None
        if gradient.is_sparse:
            gradient = gradient.coalesce()
            rows, values = gradient.indices()[0], gradient.values()
        else:
            rows, values = torch.arange(len(param), device=param.device), gradient
        (beta1, beta2), eps = group["betas"], group["eps"]
        t = state["step"][rows] + 1.0
        mean = state["exp_avg"][rows].lerp_(values, 1.0 - beta1)
        square = state["exp_avg_sq"][rows].mul_(beta2).addcmul_(values, values, value=1.0 - beta2)
        for name, value in (("step", t), ("exp_avg", mean), ("exp_avg_sq", square)):
            state[name][rows] = value
        # In single precision 1 − β₂ᵗ would lose digits.
        t = t.double().reshape(-1, *(1,) * (param.dim() - 1))
        mean, square = mean / (1.0 - beta1**t).to(param), square / (1.0 - beta2**t).to(param)
        change = mean / (square.sqrt() + eps)
        param.index_add_(0, rows, change, alpha=-float(group["lr"]))


def _counts_rows(state: Any, param: Tensor) -> bool:
    """Return whether a state has a number of steps for each row."""
    return bool(state) and param.dim() > 0 and state["step"].dim() == 1 and len(state["step"]) == len(param)
