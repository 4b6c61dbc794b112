"""A warning where two modules would share parameters by accident."""

import warnings

import pyro
from pyro.nn import PyroModule


def shared_parameters(module: PyroModule) -> list[str]:
    """Names of the module's parameters under which Pyro's param store holds the tensors of another module."""
    stored = pyro.get_param_store().get_state()["params"]
    return [
        name
        for path, part in module.named_modules(prefix=module._pyro_name)
        if isinstance(part, PyroModule)
        for attribute in part._pyro_params
        if (name := f"{path}.{attribute}".lstrip(".")) in stored
        and stored[name] is not getattr(part, f"{attribute}_unconstrained")
    ]


def warn_if_shared(owner: str, names: list[str]) -> None:
    """Warn that a module takes values that another has put into the param store under the same names.

    Unless ``module_local_params`` is set, Pyro's parameters go by name: wanted after ``pyro.get_param_store().load(...)``, a
    surprise with a second model or guide of the same class.
    """
    if names and not pyro.settings.get("module_local_params"):
        warnings.warn(
            f"{owner} takes the values of {names} from Pyro's param store, where another module has put them. Unless you "
            "loaded them (then initialize() the model too: buffers such as means are not in the store), call "
            "pyro.clear_param_store() first, or, to use several models or guides side by side, "
            "pyro.settings.set(module_local_params=True) before making them",
            stacklevel=3,
        )
