"""Tables of other libraries: as tensors, and annotated matrices of cells and genes (AnnData)."""

from pyro_lvgp._utils.tables import as_tensor
from pyro_lvgp.tables.annotated import Cells, from_anndata, write_latents

__all__ = ["Cells", "as_tensor", "from_anndata", "write_latents"]
