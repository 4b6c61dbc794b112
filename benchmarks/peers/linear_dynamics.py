"""Linear dynamical system with Gaussian noise, by maximum likelihood on Pyro's ``GaussianHMM``."""

import pyro.distributions as dist
import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import softplus


class LinearDynamics(nn.Module):
    """Linear dynamical system ``z' = A z + noise,  y = C z + c + noise`` of complete sequences of one length.

    Initial values are principal components and the least-squares map from one to the next.

    :param Y: training sequences.
    :param state_dim: dimension of z.
    """

    def __init__(self, Y: Float[Tensor, "S T D"], state_dim: int):
        super().__init__()
        rows = Y.flatten(0, 1)
        self.offset = nn.Parameter(rows.mean(0))
        scale, components = torch.linalg.svd(rows - rows.mean(0), full_matrices=False)[1:]
        spread = scale[:state_dim] / len(rows) ** 0.5
        z = ((Y - rows.mean(0)) @ components[:state_dim].mT) / spread
        self.step = nn.Parameter(torch.linalg.lstsq(z[:, :-1].flatten(0, 1), z[:, 1:].flatten(0, 1)).solution)
        self.emission = nn.Parameter(spread[:, None] * components[:state_dim])
        self.noises = nn.ParameterDict(
            {
                "start": torch.zeros(state_dim),
                "step": torch.full((state_dim,), -2.0),
                "emission": torch.full(Y.shape[2:], -2.0),
            }
        )

    def process(self, num_steps: int) -> dist.GaussianHMM:
        """Construct the distribution of sequences minus the offset, as row vectors times matrices."""
        scales = {name: softplus(raw) + 1e-3 for name, raw in self.noises.items()}
        start, step, emission = (
            dist.Normal(torch.zeros_like(scales[name]), scales[name]).to_event(1) for name in ("start", "step", "emission")
        )
        return dist.GaussianHMM(start, self.step, step, self.emission, emission, duration=num_steps)

    def fit(self, Y: Float[Tensor, "S T D"], num_steps: int, *, learning_rate: float = 0.01) -> "LinearDynamics":
        """Maximise the likelihood of all sequences by Adam."""
        optim = torch.optim.Adam(self.parameters(), lr=learning_rate)
        for _ in range(num_steps):
            optim.zero_grad()
            loss = -self.process(Y.shape[1]).log_prob(Y - self.offset).mean()
            loss.backward()
            optim.step()
        return self

    @torch.no_grad()
    def forecast(self, prefix: Float[Tensor, "S t D"], num_steps: int) -> Float[Tensor, "S steps D"]:
        """Compute the means of the next steps."""
        z = self.process(prefix.shape[1]).filter(prefix - self.offset).mean
        ahead = []
        for _ in range(num_steps):
            z = z @ self.step
            ahead.append(z @ self.emission + self.offset)
        return torch.stack(ahead, 1)
