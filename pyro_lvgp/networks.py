"""Neural networks: inference networks for data with missing entries.

Encoders map data [*, D], NaN where missing, to loc and scale [*, Q].  A row with nothing observed gets finite numbers too;
guides that multiply a prior by what the encoder says leave such rows out.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Literal

import torch
from jaxtyping import Bool, Float
from pyro.nn import PyroParam
from pyro.nn.module import to_pyro_module_
from torch import Tensor, nn


def as_pyro_module(network: nn.Module) -> nn.Module:
    """Make a network, in place, a ``PyroModule`` whose parameters are all ``PyroParam``.

    Plain ``nn.Parameter`` inside a guide fail under Pyro's setting ``module_local_params``.

    >>> net = as_pyro_module(MLP(3, 2))
    >>> [name for name, _ in net.named_parameters()][0]
    '0.weight_unconstrained'
    """
    to_pyro_module_(network)
    for module in network.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is not None and not name.endswith("_unconstrained"):
                setattr(module, name, PyroParam(parameter.detach()))
    return network


class MLP(nn.Sequential):
    """Fully connected network.

    :param in_dim: size of the input.
    :param out_dim: size of the output.
    :param hidden_dims: sizes of the hidden layers.
    :param activation: class of the activation between layers.

    >>> MLP(3, 2, [16])(torch.zeros(5, 3)).shape
    torch.Size([5, 2])
    """

    def __init__(
        self, in_dim: int, out_dim: int, hidden_dims: Sequence[int] = (64, 64), activation: type[nn.Module] = nn.SiLU
    ):
        super().__init__(*_layers([in_dim, *hidden_dims, out_dim], activation=activation))


def _layers(
    sizes: Sequence[int], linear: Callable[[int, int], nn.Module] = nn.Linear, activation: type[nn.Module] = nn.SiLU
) -> list[nn.Module]:
    """Linear layers from size to size, with activations between them."""
    return [module for a, b in pairwise(sizes) for module in (linear(a, b), activation())][:-1]


class _LinearPerOutput(nn.Module):
    """Linear layers, one for each output, initialised like ``nn.Linear``; with shared weights they differ in their biases."""

    def __init__(self, data_dim: int, in_dim: int, out_dim: int, *, share_weight: bool = False):
        super().__init__()
        bound = in_dim**-0.5
        self.weight = nn.Parameter(torch.empty(1 if share_weight else data_dim, in_dim, out_dim).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.empty(data_dim, out_dim).uniform_(-bound, bound))

    def forward(self, x: Float[Tensor, "*batch D in_dim"]) -> Float[Tensor, "*batch D out_dim"]:
        return torch.einsum("...di,dio->...do", x, self.weight) + self.bias


def _network_per_output(data_dim: int, out_dim: int, hidden_dims: Sequence[int]) -> nn.Sequential:
    """One network for each output, [*, D, 1] to [*, D, out_dim]."""
    return nn.Sequential(*_layers([1, *hidden_dims, out_dim], partial(_LinearPerOutput, data_dim)))


def _smallest_scale(like: Tensor) -> float:
    """A scale with room for sums of 1 / scale⁴, which the gradient of a precision takes: 3e-8 in float32."""
    return torch.finfo(like.dtype).tiny ** 0.2


def _positive(raw: Float[Tensor, "*batch Q"], start: float) -> Float[Tensor, "*batch Q"]:
    """Scales that are ``start`` where raw is zero."""
    raw = raw + (start + math.log(-math.expm1(-start)))  # softplus⁻¹(start)
    return nn.functional.softplus(raw).clamp_min(_smallest_scale(raw))


def _loc_and_scale(
    output: Float[Tensor, "*batch twice_Q"], start: float
) -> tuple[Float[Tensor, "*batch Q"], Float[Tensor, "*batch Q"]]:
    """Halves of a network's output, the second made positive."""
    loc, raw = output.chunk(2, -1)
    return loc, _positive(raw, start)


class _Encoder(nn.Module):
    """Checks of sizes, and of data."""

    def __init__(self, data_dim: int, latent_dim: int, hidden_dims: Sequence[int], init_scale: float, feature_dim: int = 1):
        super().__init__()
        sizes = {"data_dim": data_dim, "latent_dim": latent_dim, "hidden_dims": min(hidden_dims, default=1)}
        for name, size in (sizes | {"feature_dim": feature_dim}).items():
            if size < 1:
                raise ValueError(f"expected {name} of 1 or more, got {size}")
        if not 0 < init_scale < math.inf:
            raise ValueError(
                f"expected a positive and finite init_scale, got {init_scale}; give it as it is, not its logarithm"
            )
        self.data_dim, self.latent_dim, self.init_scale = data_dim, latent_dim, init_scale

    def _observed(self, y: Float[Tensor, "*batch D"]) -> tuple[Float[Tensor, "*batch D"], Bool[Tensor, "*batch D"]]:
        """Data with zeros where missing, as no mask keeps a NaN out of gradients later, and what is observed."""
        if y.shape[-1:] != (self.data_dim,):
            raise ValueError(
                f"expected data of shape [*, {self.data_dim}], got {list(y.shape)}; data_dim is the number of its columns"
            )
        return torch.nan_to_num(y), ~torch.isnan(y)


class ZeroImputation(_Encoder):
    r"""Encoder that puts zero where an entry is missing and says so.

    :math:`(m_n, S_n) = \mathrm{MLP}(\tilde y_n, o_n)`, with :math:`\tilde y_{nd} = y_{nd}` and :math:`o_{nd} = 1` where
    observed, both zero where missing (NaN).

    :param data_dim: number of outputs D.
    :param latent_dim: number of latent dimensions Q.
    :param hidden_dims: sizes of the hidden layers.
    :param covariance: ``"diagonal"`` returns loc and scale [*, Q]; ``"full"`` loc and scale_tril [*, Q, Q].
    :param init_scale: the scale where the network gives zero, and so about the initial one; the diagonal of scale_tril.
    :raises ValueError: for a size below 1, an ``init_scale`` that is not positive, or data with another number of outputs.

    >>> loc, scale = ZeroImputation(4, 2)(torch.tensor([[1.0, torch.nan, 0.5, 2.0]]))
    >>> loc.shape, scale.shape
    (torch.Size([1, 2]), torch.Size([1, 2]))

    Source: Ashman et al. (2020), "Sparse Gaussian process variational autoencoders", section 3.
    """

    def __init__(
        self,
        data_dim: int,
        latent_dim: int,
        hidden_dims: Sequence[int] = (64, 64),
        *,
        covariance: Literal["diagonal", "full"] = "diagonal",
        init_scale: float = 0.7,
    ):
        super().__init__(data_dim, latent_dim, hidden_dims, init_scale)
        self.covariance = covariance
        self._scale_size = latent_dim if covariance == "diagonal" else latent_dim * (latent_dim + 1) // 2
        self.net = MLP(2 * data_dim, latent_dim + self._scale_size, hidden_dims)

    def forward(self, y: Float[Tensor, "*batch D"]) -> tuple[Float[Tensor, "*batch Q"], Tensor]:
        values, observed = self._observed(y)
        output = self.net(torch.cat([values, observed.to(y)], -1))
        if self.covariance == "diagonal":
            return _loc_and_scale(output, self.init_scale)
        loc, scale = output.split([self.latent_dim, self._scale_size], -1)
        tril = scale.new_zeros(*scale.shape[:-1], self.latent_dim, self.latent_dim)
        rows, columns = torch.tril_indices(self.latent_dim, self.latent_dim, device=scale.device)
        tril[..., rows, columns] = torch.where(rows == columns, _positive(scale, self.init_scale), scale)
        return loc, tril


class _SumNet(_Encoder):
    """A network ``rho`` of the sum, over observed outputs, of their features ``h``.

    The constant 1 / √D, which rho could learn, lets wide data start near ``init_scale`` too.
    """

    h: nn.Sequential
    rho: MLP

    def forward(self, y: Float[Tensor, "*batch D"]) -> tuple[Float[Tensor, "*batch Q"], Float[Tensor, "*batch Q"]]:
        values, observed = self._observed(y)
        features = self.h(values[..., None])
        total = torch.where(observed[..., None], features, 0.0).sum(-2) / self.data_dim**0.5
        return _loc_and_scale(self.rho(total), self.init_scale)


class PointNet(_SumNet):
    r"""Encoder that sums what one network says about each observed entry.

    :math:`(m_n, \sigma_n) = \rho\big(D^{-1/2} \sum_{p \in O_n} h(p, y_{np})\big)`, where :math:`O_n` are the observed outputs
    of row n, the rest being missing (NaN).  The first layer of h is :math:`w y_{np} + e_p`, with an embedding :math:`e_p` to
    learn, so that outputs need no order: relabelled together with their embeddings, they give the same.

    :param data_dim: number of outputs D.
    :param latent_dim: number of latent dimensions Q.
    :param hidden_dims: sizes of the hidden layers, those of h and those of ρ alike.
    :param feature_dim: size of what h returns.
    :param init_scale: the scale where ρ gives zero, and so about the initial one.
    :raises ValueError: for a size below 1, an ``init_scale`` that is not positive, or data with another number of outputs.

    >>> loc, scale = PointNet(4, 2)(torch.tensor([[1.0, torch.nan, 0.5, 2.0]]))
    >>> loc.shape, scale.shape
    (torch.Size([1, 2]), torch.Size([1, 2]))

    Source: eqs. 3.32 and 3.33 of the GP-VAE thesis, whose h takes the number p itself; Ma et al. (2019), "EDDI: Efficient
    dynamic discovery of high-value information with partial VAE", for embeddings.
    """

    def __init__(
        self,
        data_dim: int,
        latent_dim: int,
        hidden_dims: Sequence[int] = (20,),
        *,
        feature_dim: int = 20,
        init_scale: float = 0.5,
    ):
        super().__init__(data_dim, latent_dim, hidden_dims, init_scale, feature_dim)
        sizes = [1, *hidden_dims, feature_dim]
        self.h = nn.Sequential(*_layers(sizes))
        self.h[0] = _LinearPerOutput(data_dim, 1, sizes[1], share_weight=True)
        self.rho = MLP(feature_dim, 2 * latent_dim, hidden_dims)


class IndexNet(_SumNet):
    r"""Encoder that sums what a network for each output says about its entry, where observed.

    :math:`(m_n, \sigma_n) = \rho\big(D^{-1/2} \sum_{p \in O_n} h_p(y_{np})\big)`, where :math:`O_n` are the observed outputs
    of row n, the rest being missing (NaN).

    :param data_dim: number of outputs D.
    :param latent_dim: number of latent dimensions Q.
    :param hidden_dims: sizes of the hidden layers, those of each h_p and those of ρ alike.
    :param feature_dim: size of what each h_p returns.
    :param init_scale: the scale where ρ gives zero, and so about the initial one.
    :raises ValueError: for a size below 1, an ``init_scale`` that is not positive, or data with another number of outputs.

    >>> loc, scale = IndexNet(4, 2)(torch.tensor([[1.0, torch.nan, 0.5, 2.0]]))
    >>> loc.shape, scale.shape
    (torch.Size([1, 2]), torch.Size([1, 2]))

    Source: eqs. 3.32 and 3.34 of the GP-VAE thesis; Ashman et al. (2020), section 3.
    """

    def __init__(
        self,
        data_dim: int,
        latent_dim: int,
        hidden_dims: Sequence[int] = (20,),
        *,
        feature_dim: int = 20,
        init_scale: float = 0.5,
    ):
        super().__init__(data_dim, latent_dim, hidden_dims, init_scale, feature_dim)
        self.h = _network_per_output(data_dim, feature_dim, hidden_dims)
        self.rho = MLP(feature_dim, 2 * latent_dim, hidden_dims)


class FactorNet(_Encoder):
    r"""Encoder that multiplies Gaussians, one from each observed output.

    .. math::

        N(m_n, \sigma_n^2) \propto \prod_{p \in O_n} N\big(\mu_p(y_{np}),\, \lambda_p(y_{np})^{-1}\big), \qquad
        \sigma_n^{-2} = \sum_{p \in O_n} \lambda_p, \qquad m_n = \sigma_n^2 \sum_{p \in O_n} \lambda_p \mu_p

    where :math:`O_n` are the observed outputs of row n, the rest being missing (NaN).  Each output that is observed makes the
    scale smaller.  With none, loc is 0 and the scale ``finfo(dtype).tiny ** -0.2``, 4e7 in float32: 1 / scale² and its
    gradient neither vanish nor overflow.

    :param data_dim: number of outputs D.
    :param latent_dim: number of latent dimensions Q.
    :param hidden_dims: sizes of the hidden layers of the network of each output.
    :param init_scale: the scale with all outputs observed where their networks give zero, and so about the initial one.
    :raises ValueError: for a size below 1, an ``init_scale`` that is not positive, or data with another number of outputs.

    >>> loc, scale = FactorNet(4, 2)(torch.tensor([[1.0, 0.2, 0.5, 2.0], [1.0, torch.nan, 0.5, 2.0]]))
    >>> (scale[0] < scale[1]).tolist()
    [True, True]

    Source: eqs. 3.35 to 3.37 of the GP-VAE thesis; Vedantam et al. (2018), "Generative models of visually grounded
    imagination".
    """

    def __init__(self, data_dim: int, latent_dim: int, hidden_dims: Sequence[int] = (20, 20), *, init_scale: float = 0.5):
        super().__init__(data_dim, latent_dim, hidden_dims, init_scale)
        self.factors = _network_per_output(data_dim, 2 * latent_dim, hidden_dims)

    def forward(self, y: Float[Tensor, "*batch D"]) -> tuple[Float[Tensor, "*batch Q"], Float[Tensor, "*batch Q"]]:
        values, observed = self._observed(y)
        locs, scales = _loc_and_scale(self.factors(values[..., None]), self.init_scale * self.data_dim**0.5)
        precisions = torch.where(observed[..., None], scales.square().reciprocal(), 0.0)
        precision = precisions.sum(-2).clamp_min(_smallest_scale(y) ** 2)
        return (precisions * locs).sum(-2) / precision, precision.rsqrt()
