"""Random points in double precision."""

import torch


def rand(*shape, dtype=torch.float64):
    return torch.randn(*shape, dtype=dtype)
