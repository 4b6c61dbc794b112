"""Handlers under which a guide runs its model: latent sites drawn from posteriors, and no more of the model than they need."""

from collections.abc import Callable, Mapping
from typing import Any

import pyro
from pyro import poutine
from pyro.poutine.messenger import Messenger
from pyro.poutine.util import site_is_subsample
from torch import Tensor


class Replace(Messenger):
    """Draw latent sites from something else than their priors."""

    def __init__(self, posterior: Callable[[str, Any], Any]):
        super().__init__()
        self._posterior = posterior

    def _pyro_sample(self, msg):
        if not (msg["is_observed"] or site_is_subsample(msg) or msg["infer"].get("_deterministic")):
            msg["fn"] = self._posterior(msg["name"], msg["fn"])


class HideObserved(poutine.block_messenger.BlockMessenger):
    """Guides have no observed sites."""

    def __init__(self):
        super().__init__(lambda msg: msg["type"] == "sample" and msg["is_observed"])


class TakePlates(Messenger):
    """Give a part of a guide that makes its plates itself the rows in those of the whole, which are in the trace already."""

    def __init__(self, plates: Mapping[str, pyro.plate]):
        super().__init__()
        self._plates = plates

    def _pyro_sample(self, msg):
        if site_is_subsample(msg) and msg["name"] in self._plates:
            msg["value"], msg["stop"] = self._plates[msg["name"]]._indices, True


class AllDrawn(Exception):
    """Nothing of the model is left that a guide needs."""


class StopAfter(Messenger):
    """Note the values of latent sites, and leave the model after the last: a guide needs no decoder and no likelihood."""

    def __init__(self, names: list[str]):
        super().__init__()
        self.values: dict[str, Tensor] = {}
        self._left = set(names)

    def _pyro_post_sample(self, msg):
        self.values[msg["name"]] = msg["value"]
        self._left.discard(msg["name"])
        if not self._left:
            raise AllDrawn
