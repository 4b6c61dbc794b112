"""Check of latent sites that only the model, or only the guide, masks."""

from typing import Any

from pyro.poutine.messenger import Messenger
from pyro.poutine.util import site_is_subsample

from pyro_lvgp.infer.elbo._terms import leaves_entries_out

__all__ = ["RefuseMaskedLatents"]


class RefuseMaskedLatents(Messenger):
    """Raise a ``ValueError`` at the end of an evaluation of a bound if model and guide mask a latent site differently.

    Where the model alone masks a site, as ``obs_mask`` does at the entries that are observed, Pyro's bounds have the entropy
    of the guide and no prior, and increase without limit.
    """

    def __enter__(self):
        self._is_masked: dict[str, set[bool]] = {}
        return super().__enter__()

    def _pyro_post_sample(self, msg: Any) -> None:
        if not (msg["is_observed"] or site_is_subsample(msg)):
            self._is_masked.setdefault(msg["name"], set()).add(leaves_entries_out(msg))

    def __exit__(self, exc_type, exc_value, traceback):
        result = super().__exit__(exc_type, exc_value, traceback)
        if exc_type is None and (names := [name for name, found in self._is_masked.items() if len(found) == 2]):
            raise ValueError(
                f"expected latent sites that model and guide mask alike, got a mask of one of them at {names}, as obs_mask "
                "makes one in the model: this bound would increase without limit; pass loss=MeanFieldELBO(), which leaves "
                "masked entries out of both"
            )
        return result
