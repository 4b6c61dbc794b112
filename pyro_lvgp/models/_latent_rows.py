"""Sizes, plate, initial values and checks of models of rows with a latent each."""

from abc import abstractmethod
from collections.abc import Callable
from typing import Any, cast

import pyro
import torch
from jaxtyping import Float, Int
from pyro import poutine
from pyro.distributions.torch_distribution import TorchDistributionMixin
from pyro.infer.autoguide.initialization import init_to_median
from torch import Tensor

from pyro_lvgp._utils.abstract import AbstractModuleMeta
from pyro_lvgp._utils.tables import Labels, Table, as_tensor, check_columns, labels_of
from pyro_lvgp._utils.unique_names import UniquelyNamed
from pyro_lvgp._utils.validation import check_data, check_values
from pyro_lvgp.infer.protocols import HasEncoders
from pyro_lvgp.models._own_sites import OwnSites
from pyro_lvgp.models.row_arguments import RowArguments

Guide = Callable[..., Any]
Latents = Float[Tensor, "B Q"] | TorchDistributionMixin | Table


class LatentRows(UniquelyNamed, OwnSites, metaclass=AbstractModuleMeta):
    """Base class of models of rows y_n with one latent x_n for each row, in plate ``data`` at dim −1, and shared sites.

    :param num_data: number N of rows.
    :param data_dim: number D of columns.
    :param latent_dim: number Q of latent dimensions.
    """

    local_plate = "data"
    likelihood: Any

    def __init__(self, num_data: int, data_dim: int, latent_dim: int):
        super().__init__()
        self.num_data, self.data_dim, self.latent_dim = num_data, data_dim, latent_dim
        self.initial_values: dict[str, Tensor] = {}
        self._column_labels: tuple[Any, ...] | None = None  # labels of the columns of the training data

    @abstractmethod
    def forward(self, y: Float[Tensor, "B D"] | None = None, idx: Int[Tensor, " B"] | None = None) -> Tensor:
        """Sample the sites that rows share, ``X`` and ``y``.

        :param y: observations, NaN where missing; None to generate.
        :param idx: indices of the rows in y; None for all rows.
        :returns: the value of the site y.
        """

    @abstractmethod
    def latent_candidates(self) -> Float[Tensor, "C Q"]:
        """Return the latents among which :meth:`infer_latents` chooses the initial latents of a new row."""

    def data_plate(self, y: Tensor | None = None, idx: Tensor | None = None) -> pyro.plate:
        """Create the plate over rows, for the model and its guides.

        :param y: rows, which have no effect; guides pass all arguments of the model.
        :param idx: indices of the rows; None for all rows.
        """
        return pyro.plate("data", self.num_data, subsample=idx, dim=-1)

    create_plates = data_plate

    @torch.no_grad()
    def example_data(self) -> tuple[Float[Tensor, "N D"]]:
        """Draw rows from the model, such as those that it can be fitted to."""
        with poutine.block():
            return (self().detach(),)

    def init_loc_fn(self, site: dict) -> Tensor:
        """Return the initial value of a site in a guide: that in ``initial_values``, or else the median of the prior.

        :param site: site of a trace of the model.
        """
        value = self.initial_values.get(site["name"])
        return init_to_median(site) if value is None else value.to(next(self.parameters(), value))

    def _checked_rows(self, rows: RowArguments | None, num_rows: int) -> RowArguments | None:
        """Arguments of rows that are not training rows; None if training rows have none.

        :raises ValueError: if they are of another number of rows, or others than those of training rows.
        """
        if rows is not None:
            raise TypeError(f"expected no rows for a {type(self).__name__}, which has no arguments by row, got {rows}")
        return None

    def _replaced_rows(self, idx: Tensor, rows: RowArguments) -> RowArguments | None:
        """Arguments of training rows, of which some are replaced."""
        return self._checked_rows(rows, len(idx))

    def as_data(self, Y: Table) -> tuple[Float[Tensor, "N D"]]:
        """Convert a table of rows to a tensor of the model's dtype and device; tensors are returned as they are.

        :param Y: tensor, array, data frame, sparse matrix or other table (:func:`~pyro_lvgp.tables.as_tensor`).
        :raises ValueError: if columns have other labels, or another order of them, than those of the training data.
        """
        check_columns(labels_of(Y).columns, self._column_labels, "Y")
        return (as_tensor(Y, like=self.latent_candidates(), name="Y"),)

    def _as_latents(self, X: Latents) -> Latents:
        """Convert a table of latents to a tensor; return tensors and distributions as they are."""
        is_distribution = isinstance(X, torch.distributions.Distribution)
        return X if is_distribution else as_tensor(X, like=self.latent_candidates(), name="X")

    def _labels(self, table: Table) -> Labels:
        """Return the labels of the rows and columns of predictions: those of a table, and of columns in training."""
        dims, index, columns = labels_of(table)
        return Labels(dims, index, self._column_labels if columns is None else columns)

    def _check_rows(self, Y: Tensor) -> None:
        """Raise unless Y has the model's number of columns, dtype and device, and is in the support of its likelihood."""
        check_data(Y, self.data_dim, like=self.latent_candidates(), name="Y")
        self._check_entries(Y, name="Y")

    def _check_are_training_rows(self, guide: Guide, Y: Tensor, idx: Tensor | None) -> None:
        """Raise if most rows differ in most entries from the training rows of their latents, as far as these are known.

        Under a guide with an encoder the latents are those of the given rows, whichever they are.
        """
        known = self.__dict__.get("_training_rows")
        if known is None or encoder_of_latents(guide) is not None:
            return
        rows = known if idx is None else known[idx]
        both = ~(torch.isnan(Y) | torch.isnan(rows))
        differs = 2 * (both & torch.ne(Y, rows)).sum(-1) > both.sum(-1)
        if 2 * int(differs.sum()) > len(Y):
            raise ValueError(
                f"expected training rows, got {len(Y)} rows of which {int(differs.sum())} differ in most entries from "
                "the training rows of these indices, whose latents they would get; infer the latents of new rows first: "
                "impute(guide, Y, latents=model.infer_latents(guide, Y))"
            )

    def __getstate__(self):
        # Copies do not contain the data.
        return {name: value for name, value in super().__getstate__().items() if name != "_training_rows"}

    def _check_entries(self, y: Tensor, name: str = "y") -> None:
        """Raise if an entry is infinite, or outside the support."""
        check_values(y, rows=False, columns=False, name=name)
        self.likelihood.check(y)

    def _check_latents(self, X: Latents, num_rows: int | None = None) -> None:
        """Raise unless X are finite latents of rows or a distribution over these, of ``num_rows`` rows if given."""
        if isinstance(X, torch.distributions.Distribution):
            shape = [*X.batch_shape, *X.event_shape]
        else:
            latents = cast(Tensor, X)
            check_data(latents, self.latent_dim, like=self.latent_candidates(), name="X")
            if not latents.isfinite().all():
                raise ValueError("expected finite latents, got NaN or infinity; call infer_latents(...) for new rows")
            shape = [*latents.shape]
        if len(shape) != 2 or shape[1] != self.latent_dim or num_rows not in (None, shape[0]):
            rows = "rows" if num_rows is None else num_rows
            raise ValueError(
                f"expected latents [{rows}, {self.latent_dim}], one for each row, got {shape}; use .expand([rows]) on "
                "the distribution of the latents of one row"
            )


def encoder_of_latents(guide: Guide) -> Any:
    """Return the encoder of a guide for the site ``X``; None if it has none."""
    return guide.encoder_of("X") if isinstance(guide, HasEncoders) else None
