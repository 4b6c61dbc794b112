"""Base class of covariance functions."""

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
from jaxtyping import Float, Shaped
from torch import Tensor
from torch.distributions import transform_to
from torch.utils._pytree import tree_map_only

from pyro_lvgp._utils.standalone import StandaloneModule
from pyro_lvgp._utils.validation import check_sizes
from pyro_lvgp.ops.state_space import StateSpaceModel

__all__ = ["Kernel", "KernelParams", "format_numbers", "params_in_double"]

KernelParams: TypeAlias = tuple[Any, ...]  # tensors; for sums and products, one tuple of tensors for each part


def params_in_double(params: KernelParams) -> KernelParams:
    """Convert the parameters of a kernel to double precision.

    :param params: the tuple that :meth:`Kernel.params` returns.
    """
    return tree_map_only(Tensor, Tensor.double, params)


class Kernel(StandaloneModule):
    """Covariance function k(x, z) that broadcasts over leading batch dimensions.

    ``kernel(X, Z)`` returns the matrix k(x_n, z_m), and ``kernel.diagonal(X)`` the variances k(x_n, x_n).  Their batch shape
    is the shape to which the leading dimensions of X, of Z and of the parameters broadcast.

    Parameters are Pyro parameters.  Put a prior on one with :class:`~pyro.nn.PyroSample`; within one call of the
    PyroModule that owns the kernel, every use of the kernel then sees the same draw.  Called outside any model, guide
    or Pyro handler, a kernel is a plain function of its own parameters and leaves Pyro's global parameter store alone.

    A subclass implements

    - :meth:`k`, the covariance function, and :meth:`k_diagonal`, its values k(x, x): pure functions of tensors, which receive
      checked inputs with the active columns only;
    - :meth:`params`, which reads the parameters, if there are any;
    - :attr:`is_markov` and :meth:`state_space_model`, if functions of one input are Gauss–Markov processes;
    - :attr:`level_columns`, if columns are levels of categories, which inducing points must not leave.

    Sums, products, batches and error texts then work as for the kernels of this library.

    :param input_dim: number of columns on which the kernel acts; None if its parts check that.
    :param batch_shape: shape of a batch of kernels.
    :param active_dims: indices of the columns on which the kernel acts, ``input_dim`` of them; by default all columns.
    :raises ValueError: if ``input_dim`` is not positive, or ``active_dims`` has another length or a negative index.
    :raises TypeError: if ``input_dim`` is no integer.

    >>> class White(Kernel):
    ...     def k(self, X, Z, params):
    ...         return (X[..., :, None, :] == Z[..., None, :, :]).all(-1).to(X.dtype)
    ...
    ...     def k_diagonal(self, X, params):
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
                f"input_dim is the number of active columns: try input_dim={len(active_dims)}."
            )
        if active_dims is not None and len(set(active_dims)) < len(active_dims):
            raise ValueError(f"expected active_dims that differ, got {list(active_dims)}; name each column once")
        self.input_dim = input_dim
        self.batch_shape = torch.Size(batch_shape)
        self.active_dims = None if active_dims is None else tuple(active_dims)
        # As a buffer the index moves to the device once; a list would be copied there at every call.
        self.register_buffer("_columns", None if active_dims is None else torch.tensor(active_dims), persistent=False)

    @abstractmethod
    def k(
        self, X: Float[Tensor, "*#batch N Q"], Z: Float[Tensor, "*#batch M Q"], params: KernelParams
    ) -> Float[Tensor, "*out N M"]:
        """Compute the covariance matrix of checked points with the active columns only; to be implemented by subclasses.

        :param X: N points.
        :param Z: M points.
        :param params: the tuple that :meth:`params` returns.
        """

    @abstractmethod
    def k_diagonal(self, X: Float[Tensor, "*#batch N Q"], params: KernelParams) -> Float[Tensor, "*out N"]:
        """Compute the variances k(x_n, x_n), with the batch shape of :meth:`k`; to be implemented by subclasses.

        :param X: N checked points with the active columns only.
        :param params: the tuple that :meth:`params` returns.
        """

    def params(self) -> KernelParams:
        """Read the current parameters; an empty tuple unless a subclass overrides this method.

        Call it once in a model, since a prior draws a value at each read.
        """
        return ()

    def forward(
        self, X: Shaped[Tensor, "*#batch N _"], Z: Shaped[Tensor, "*#batch M _"] | None = None
    ) -> Float[Tensor, "*out N M"]:
        """Compute the covariance matrix of the points X and Z at the current parameters.

        :param X: N points.
        :param Z: M points; by default X.
        :raises ValueError: if the number of columns is not ``input_dim``.
        :raises TypeError: if the points are integers.
        """
        return self.covariance(X, X if Z is None else Z, self.params())

    def covariance(
        self, X: Shaped[Tensor, "*#batch N _"], Z: Shaped[Tensor, "*#batch M _"], params: KernelParams
    ) -> Float[Tensor, "*out N M"]:
        """Compute the covariance matrix at given parameters.

        Unlike ``kernel(X, Z)`` this is a pure function of tensors, which can be differentiated and compiled.

        :param X: N points.
        :param Z: M points.
        :param params: the tuple that :meth:`params` returned.
        """
        return self.k(self._select(X, "X"), self._select(Z, "Z"), params)

    def diagonal(self, X: Shaped[Tensor, "*#batch N _"], params: KernelParams | None = None) -> Float[Tensor, "*out N"]:
        """Compute the variances k(x_n, x_n), the diagonal of ``kernel(X)``, without the matrix.

        :param X: N points.
        :param params: the tuple that :meth:`params` returned; by default the current parameters.
        :raises ValueError: if the number of columns is not ``input_dim``.
        :raises TypeError: if the points are integers.
        """
        if params is None:
            with self._reading_params():
                params = self.params()
        variances = self.k_diagonal(self._select(X, "X"), params)
        batch = variances.shape[:-1]
        if torch.broadcast_shapes(batch, self.batch_shape) != batch:
            raise ValueError(
                f"expected k_diagonal of {type(self).__name__} to have the batch shape {list(self.batch_shape)} of the kernel "
                f"before its points, got shape {list(variances.shape)}; expand its result"
            )
        return variances

    @property
    def is_markov(self) -> bool:
        """Flag that functions of one input are Gauss–Markov processes, whose model :meth:`state_space_model` returns."""
        return False

    @property
    def level_columns(self) -> tuple[int, ...]:
        """Columns of the inputs that the kernel reads as integer levels of categories."""
        return ()

    def state_space_model(self, steps: Float[Tensor, "*#batch T"], params: KernelParams) -> StateSpaceModel:
        """Linear-Gaussian state-space model of the function at increasing inputs, for kernels with :attr:`is_markov`.

        :param steps: differences of successive inputs.
        :param params: the tuple that :meth:`params` returned.
        :raises NotImplementedError: if the kernel has none.
        """
        raise NotImplementedError(
            f"expected a kernel with is_markov, got {type(self).__name__}, which has no state-space model; use Matern(1), "
            "or sums and products of such kernels"
        )

    def _pyro_set_supermodule(self, name: str, context: Any) -> None:
        try:
            super()._pyro_set_supermodule(name, context)
        except AssertionError as error:  # Pyro cannot rename parts that have run
            raise ValueError(
                f"expected a kernel of its own for each model, got a {type(self).__name__} that has run elsewhere; make a new "
                "one, and copy the learned parameters by its load_state_dict(kernel.state_dict())."
            ) from error

    # Sums and products are subclasses of this class, so that their module can only be imported inside the operators.
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

    def _select(self, X: Tensor, name: str) -> Tensor:
        """Check the points and select their active columns."""
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
        """Raise a ``ValueError`` if the kernel does not act on points with this number of columns.

        :param num_columns: number of columns of the points.
        :param name: name of the points in the error.
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

    def parameters_text(self) -> str:
        """Format the current values of the parameters for error messages, without a Pyro message."""
        texts = []
        for name, (constraint, _) in self._pyro_params.items():
            value = transform_to(constraint)(getattr(self, f"{name}_unconstrained"))
            texts.append(f"{name}={format_numbers(value)}")
        for name, prior in self._pyro_samples.items():
            drawn = self._pyro_context.get(f"{self._pyro_name}.{name}" if self._pyro_name else name)
            family = type(prior).__name__ if isinstance(prior, torch.distributions.Distribution) else "prior"
            texts.append(f"{name} ~ {family}" if drawn is None else f"{name}={format_numbers(drawn)}")
        return ", ".join(sorted(texts))


def format_numbers(value: Tensor) -> str:
    """Format a scalar, or the first eight entries of a tensor, with four digits."""
    numbers = [f"{v:.4g}" for v in value.detach().flatten()[:8].tolist()]
    more = ", ..." if value.numel() > len(numbers) else ""
    return f"[{', '.join(numbers)}{more}]" if value.dim() else numbers[0]
