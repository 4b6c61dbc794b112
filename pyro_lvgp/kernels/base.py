"""What a kernel is, and sums and products of kernels."""

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, TypeAlias

import torch
from jaxtyping import Float, Shaped
from pyro.nn import PyroModule
from pyro.poutine.runtime import am_i_wrapped
from torch import Tensor, nn
from torch.distributions import transform_to
from torch.utils._pytree import tree_map_only

from pyro_lvgp._utils.validation import check_sizes
from pyro_lvgp.ops.state_space import StateSpaceModel

Params: TypeAlias = tuple[Any, ...]  # tensors, or for sums and products a tuple of tensors for each part


def params_in_double(params: Params) -> Params:
    """Parameters of a kernel in double precision."""
    return tree_map_only(Tensor, Tensor.double, params)


class Kernel(PyroModule):
    """A covariance function k(x, z) that broadcasts over leading batch dimensions.

    Calling it, ``kernel(X, Z)``, gives the matrix k(x_n, z_m); ``kernel.diagonal(X)`` gives the variances k(x_n, x_n).  Its
    batch shape is what the leading dimensions of X, of Z and of the parameters broadcast to.

    Parameters are Pyro parameters.  Put a prior on one with :class:`~pyro.nn.PyroSample`; within one call of the
    PyroModule that owns the kernel, every use of the kernel then sees the same draw.  Called outside any model, guide
    or Pyro handler, a kernel is a plain function of its own parameters: it leaves Pyro's global parameter store alone,
    where all kernels that have no owner would share the names "variance" and "lengthscale".

    You implement ``_covariance(X, Z, params)`` and ``_diagonal(X, params)``, pure functions of tensors, and with parameters
    ``params()``, which reads them.  You get checked inputs, the choice of columns, sums and products, and error texts.

    :param input_dim: number of columns the kernel acts on; None leaves that to parts that check it.
    :param batch_shape: shape of a batch of kernels.
    :param active_dims: the columns to act on, ``input_dim`` of them; all by default.
    :raises ValueError: if ``input_dim`` or ``active_dims`` make no sense.
    :raises TypeError: if ``input_dim`` is no integer.

    >>> class White(Kernel):
    ...     def _covariance(self, X, Z, params):
    ...         return (X[..., :, None, :] == Z[..., None, :, :]).all(-1).to(X.dtype)
    ...
    ...     def _diagonal(self, X, params):
    ...         return torch.ones_like(X[..., 0])
    >>> (3 * White(1))(torch.tensor([[0.0], [1.0]]))
    tensor([[3., 0.],
            [0., 3.]])
    """

    def __init__(
        self,
        input_dim: int | None = None,
        *,
        batch_shape: Sequence[int] = (),
        active_dims: Sequence[int] | None = None,
    ) -> None:
        super().__init__()
        if input_dim is not None:
            check_sizes(input_dim=input_dim)
        if active_dims is not None and (len(active_dims) != input_dim or min(active_dims) < 0):
            raise ValueError(
                f"expected active_dims with input_dim={input_dim} columns, none negative, got {list(active_dims)}; "
                f"input_dim counts the active columns only: try input_dim={len(active_dims)}."
            )
        self.input_dim = input_dim
        self.batch_shape = torch.Size(batch_shape)
        self.active_dims = None if active_dims is None else tuple(active_dims)
        # A buffer, because an index made of a list is copied to the device at every call.
        self.register_buffer("_columns", None if active_dims is None else torch.tensor(active_dims), persistent=False)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return nn.Module.__call__(self, *args, **kwargs) if self._outside_pyro() else super().__call__(*args, **kwargs)

    def params(self) -> Params:
        """The parameters as they are now; read them once in a model, since a prior draws at each read."""
        return ()

    def forward(
        self, X: Shaped[Tensor, "*#batch N _"], Z: Shaped[Tensor, "*#batch M _"] | None = None
    ) -> Float[Tensor, "*out N M"]:
        """Covariance matrix of the points X and Z.

        :param X: N points.
        :param Z: M points; X itself by default.
        :raises ValueError: if the number of columns is not ``input_dim``.
        :raises TypeError: if the points are integers.
        """
        return self.covariance(X, X if Z is None else Z, self.params())

    def covariance(
        self, X: Shaped[Tensor, "*#batch N _"], Z: Shaped[Tensor, "*#batch M _"], params: Params
    ) -> Float[Tensor, "*out N M"]:
        """As ``kernel(X, Z)`` at given parameters: a pure function of tensors, which can be differentiated and compiled.

        :param X: N points.
        :param Z: M points.
        :param params: what :meth:`params` returned.
        """
        return self._covariance(self._select(X, "X"), self._select(Z, "Z"), params)

    def diagonal(self, X: Shaped[Tensor, "*#batch N _"], params: Params | None = None) -> Float[Tensor, "*out N"]:
        """Variances k(x_n, x_n) of the points: the diagonal of ``kernel(X)`` without the matrix.

        :param X: N points.
        :param params: what :meth:`params` returned; read now if omitted.
        :raises ValueError: if the number of columns is not ``input_dim``.
        :raises TypeError: if the points are integers.
        """
        if params is None:
            with nullcontext() if self._outside_pyro() else self._pyro_context:
                params = self.params()
        variances = self._diagonal(self._select(X, "X"), params)
        batch = variances.shape[:-1]
        if torch.broadcast_shapes(batch, self.batch_shape) != batch:
            raise ValueError(
                f"expected _diagonal of {type(self).__name__} to have the batch shape {list(self.batch_shape)} of the kernel "
                f"before its points, got {list(variances.shape)}; expand it"
            )
        return variances

    @property
    def is_markov(self) -> bool:
        """Whether functions of one increasing input are Gauss–Markov chains under this kernel."""
        return False

    def state_space_model(self, steps: Float[Tensor, "*#batch T"], params: Params) -> StateSpaceModel:
        """The chain of functions at increasing inputs, if there is one: see :attr:`is_markov`.

        :param steps: differences of the inputs.
        :param params: what :meth:`params` returned.
        """
        raise NotImplementedError(f"{type(self).__name__} has no chain")

    def _pyro_set_supermodule(self, name: str, context: Any) -> None:
        try:
            super()._pyro_set_supermodule(name, context)
        except AssertionError as error:  # Pyro cannot rename parts that have run
            raise ValueError(
                f"expected a kernel of its own for each model, got a {type(self).__name__} that has run elsewhere; make a new "
                "one, whose load_state_dict(kernel.state_dict()) takes over what was learned."
            ) from error

    def _outside_pyro(self) -> bool:
        return not (self._pyro_context.active or am_i_wrapped())

    # Sums and products derive from this class: imported when they are made.
    def __add__(self, other: object) -> "Kernel":
        from pyro_lvgp.kernels.composition import Sum

        return Sum(self, other) if isinstance(other, Kernel | float | int) else NotImplemented

    def __radd__(self, other: object) -> "Kernel":
        from pyro_lvgp.kernels.composition import Sum

        return Sum(other, self) if isinstance(other, float | int) else NotImplemented

    def __mul__(self, other: object) -> "Kernel":
        from pyro_lvgp.kernels.composition import Product

        return Product(self, other) if isinstance(other, Kernel | float | int) else NotImplemented

    def __rmul__(self, other: object) -> "Kernel":
        from pyro_lvgp.kernels.composition import Product

        return Product(other, self) if isinstance(other, float | int) else NotImplemented

    def _covariance(self, X: Tensor, Z: Tensor, params: Params) -> Tensor:
        raise NotImplementedError(f"{type(self).__name__} must implement _covariance(X, Z, params)")

    def _diagonal(self, X: Tensor, params: Params) -> Tensor:
        raise NotImplementedError(f"{type(self).__name__} must implement _diagonal(X, params)")

    def _select(self, X: Tensor, name: str) -> Tensor:
        """Check the points ``X`` and pick the active columns."""
        if not torch.is_tensor(X):
            raise TypeError(f"expected {name} to be a torch.Tensor, got {type(X).__name__}; use torch.as_tensor(...).")
        if not X.is_floating_point():
            raise TypeError(f"expected {name} of floating point, got {X.dtype}; convert it with {name}.double().")
        if X.dim() < 2:
            raise ValueError(
                f"expected {name} of shape [*batch, N, Q], got {list(X.shape)}; "
                f"points with one column need {name}.unsqueeze(-1)."
            )
        self.check_columns(X.shape[-1], name)
        return X if self.active_dims is None else X.index_select(-1, self._columns)

    def check_columns(self, num_columns: int, name: str = "X") -> None:
        """Raise a ``ValueError`` if the kernel is known not to act on points with so many columns.

        :param num_columns: number of columns of the points.
        :param name: what the error calls the points.
        """
        if self.active_dims is not None:
            if num_columns <= max(self.active_dims):
                raise ValueError(
                    f"expected {name} with at least {max(self.active_dims) + 1} columns, got {num_columns}; "
                    f"change active_dims={list(self.active_dims)} of {type(self).__name__}."
                )
        elif self.input_dim not in (None, num_columns):
            single = f"give a single column as {name}[:, None], " if self.input_dim == 1 else ""
            raise ValueError(
                f"expected {name} with {self.input_dim} columns, got {num_columns}; {single}make the kernel by "
                f"{type(self).__name__}({num_columns}), or pick columns with active_dims."
            )

    def _parameters_text(self) -> str:
        """Current values of the parameters, for error messages; sends no Pyro message."""
        texts = []
        for name, (constraint, _) in self._pyro_params.items():
            value = transform_to(constraint)(getattr(self, f"{name}_unconstrained"))
            texts.append(f"{name}={_numbers(value)}")
        for name, prior in self._pyro_samples.items():
            drawn = self._pyro_context.get(f"{self._pyro_name}.{name}" if self._pyro_name else name)
            what = type(prior).__name__ if isinstance(prior, torch.distributions.Distribution) else "prior"
            texts.append(f"{name} ~ {what}" if drawn is None else f"{name}={_numbers(drawn)}")
        return ", ".join(sorted(texts))


def _numbers(value: Tensor) -> str:
    numbers = [f"{v:.4g}" for v in value.detach().flatten()[:8].tolist()]
    more = ", ..." if value.numel() > len(numbers) else ""
    return f"[{', '.join(numbers)}{more}]" if value.dim() else numbers[0]
