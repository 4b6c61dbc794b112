"""Sites whose priors a model's ``forward`` defines."""

from typing import Any

from pyro.nn import PyroParam, PyroSample
from pyro.nn.module import PyroModule


class OwnSites(PyroModule):
    """Module that refuses a prior or a parameter at an attribute with the name of a site of its own.

    ``forward`` samples these sites itself, so that an attribute of that name would have no effect.  ``event_dims`` has the
    names of the sites.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        is_site = name in self.__dict__.get("event_dims", ())
        if is_site and isinstance(value, PyroSample | PyroParam) and name not in self._own_names():
            raise ValueError(
                f"expected a prior or value of a parameter of {type(self).__name__}, got a {type(value).__name__} at "
                f"{name!r}, a site whose distribution is a part of the model: it would have no effect; override forward in a "
                "subclass, or use pyro.poutine.condition"
            )
        super().__setattr__(name, value)

    def _own_names(self) -> set[str]:
        """Return the names of attributes, parameters and submodules."""
        return {*vars(self), *self._parameters, *self._buffers, *self._modules, *self._pyro_params, *self._pyro_samples}
