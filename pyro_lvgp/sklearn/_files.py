"""Fitted transformers as numbers, strings and tensors beside their model and guide."""

import os
from typing import Any, TypeVar

import numpy as np
import torch
from sklearn.preprocessing import StandardScaler

from pyro_lvgp._utils.construction import construction_of
from pyro_lvgp.infer import FitResult, Saved
from pyro_lvgp.likelihoods import Likelihood

_OF_MODEL = "that of the model"  # a likelihood among the parameters
_SCALER = ("mean_", "scale_", "var_", "n_samples_seen_")
_HISTORY = ("num_entries", "losses", "seconds", "interrupted", "steps_per_epoch", "tolerance")
_COUNTED = ("n_features_in_", "n_iter_", "_seed", "_local")

Transformer = TypeVar("Transformer")


def describe(estimator: Any) -> dict[str, Any]:
    """Return what :func:`restore` needs besides model and guide.

    :param estimator: a fitted :class:`~pyro_lvgp.sklearn._latent_transformer.LatentTransformer`.
    """
    params = {name: _as_simple(value, name) for name, value in estimator.get_params(deep=False).items()}
    scaler = {name: torch.as_tensor(value) for name in _SCALER if (value := getattr(estimator.scaler_, name)) is not None}
    names = getattr(estimator, "feature_names_in_", None)
    return {
        "estimator": type(estimator).__name__,
        "params": params,
        "scaler": {"with_mean": estimator.scaler_.with_mean, "with_std": estimator.scaler_.with_std, "fitted": scaler},
        "history": {name: getattr(estimator.history_, name) for name in _HISTORY},
        "embedding": torch.as_tensor(estimator.embedding_),
        "feature_names": None if names is None else list(names),
        "fitted": {name: getattr(estimator, name) for name in _COUNTED},
    }


def restore(cls: type[Transformer], saved: Saved, path: str | os.PathLike[str]) -> Transformer:
    """Make a fitted estimator of its model, its guide and what :func:`describe` returned.

    :param cls: class of the estimator.
    :param saved: content of the file.
    :param path: name of the file, for errors.
    :raises ValueError: for a file of something else.
    """
    extras = saved.extras
    if (kind := extras.get("estimator")) != cls.__name__:
        advice = "pyro_lvgp.load(path)" if kind is None else f"{kind}.load(path)"
        raise ValueError(f"expected a file of {cls.__name__}.save, got {path}, of {kind or 'a model'}; use {advice}")
    params = extras["params"]
    if params["likelihood"] == _OF_MODEL:
        made: Any = construction_of(saved.model.likelihood)
        params["likelihood"] = made.cls(*made.args, **made.kwargs)
    estimator: Any = cls(**params)
    scaler, fitted = extras["scaler"], extras["scaler"]["fitted"]
    estimator.scaler_ = StandardScaler(with_mean=scaler["with_mean"], with_std=scaler["with_std"])
    learned = {name: fitted[name].numpy() if name in fitted else None for name in _SCALER}
    vars(estimator.scaler_).update(learned, n_features_in_=extras["fitted"]["n_features_in_"])
    vars(estimator).update(extras["fitted"], model_=saved.model, guide_=saved.guide, embedding_=extras["embedding"].numpy())
    estimator.history_ = FitResult(**extras["history"])
    if (names := extras["feature_names"]) is not None:
        estimator.feature_names_in_ = np.asarray(names, dtype=object)
    return estimator


def _as_simple(value: Any, name: str) -> Any:
    """Return a parameter as a number or a string."""
    if isinstance(value, Likelihood):
        return _OF_MODEL
    if isinstance(value, torch.device):
        return str(value)
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.random.RandomState):
        raise TypeError(
            f"expected an integer or None as {name} in a file, got a RandomState; set_params({name}=...) changes it"
        )
    return value
