"""Effect handlers for guides that run their model: posteriors instead of priors, and a stop after the last latent site."""

from collections.abc import Callable, Mapping
from typing import Any

import pyro
from pyro import poutine
from pyro.poutine.messenger import Messenger
from pyro.poutine.runtime import effectful
from pyro.poutine.util import site_is_subsample
from torch import Tensor


@effectful(type="plate_indices")
def plate_indices() -> dict[str, Tensor]:
    """Return the row indices of the plates of the model that a guide runs, by name; empty if the guide runs no model."""
    return {}


class ReplacePriors(Messenger):
    """Draw latent sites from posteriors instead of their priors, and record the row indices of the model's plates.

    :param posterior: maps the name of a site and its prior to a distribution.
    """

    def __init__(self, posterior: Callable[[str, Any], Any]):
        super().__init__()
        self._posterior = posterior
        self._indices: dict[str, Tensor] = {}

    def _pyro_post_sample(self, msg):
        if site_is_subsample(msg):
            self._indices[msg["name"]] = msg["value"]

    def _pyro_plate_indices(self, msg):
        msg["value"] = self._indices

    def _pyro_sample(self, msg):
        if not (msg["is_observed"] or site_is_subsample(msg) or msg["infer"].get("_deterministic")):
            msg["fn"] = self._posterior(msg["name"], msg["fn"])


class HideObserved(poutine.block_messenger.BlockMessenger):
    """Hide the observed sites of the model from traces of the guide."""

    def __init__(self):
        super().__init__(lambda msg: msg["type"] == "sample" and msg["is_observed"])


class ShareSubsamples(Messenger):
    """Give the plates that a part of a guide creates the subsamples of the whole guide's plates.

    Subsamples of the part are hidden, because a trace has those of the whole guide already.

    :param plates: plates of the whole guide, by name.
    """

    def __init__(self, plates: Mapping[str, pyro.plate]):
        super().__init__()
        self._plates = plates

    def _pyro_sample(self, msg):
        if site_is_subsample(msg) and msg["name"] in self._plates:
            msg["value"], msg["stop"] = self._plates[msg["name"]]._indices, True


class AllDrawn(Exception):
    """Raised after the last latent site of the model."""


class StopAfterLatents(Messenger):
    """Record the values of latent sites, and raise :class:`AllDrawn` after the last, before decoder and likelihood.

    :param names: names of the latent sites.
    """

    def __init__(self, names: list[str]):
        super().__init__()
        self.values: dict[str, Tensor] = {}
        self._remaining = set(names)

    def _pyro_post_sample(self, msg):
        self.values[msg["name"]] = msg["value"]
        self._remaining.discard(msg["name"])
        if not self._remaining:
            raise AllDrawn
