"""Log joint of a model at many points, without a trace of the model at each of them."""

from torch import Tensor

from pyro_lvgp.guides.annealed._targets import TracedTarget
from pyro_lvgp.guides.annealed.transitions import Coordinates
from pyro_lvgp.infer._recorded_function import RecordedFunction


class RecordedTarget:
    """Log joint and score of a traced target, as graphs after some evaluations.

    :param target: a target that does not change, and is not differentiated.
    """

    def __init__(self, target: TracedTarget):
        self._log_joint = RecordedFunction(lambda *z: (target.log_joint(z),))
        self._log_joint_and_score = RecordedFunction(lambda *z: _flat(*target.log_joint_and_score(z)))

    def log_joint(self, z: Coordinates) -> Tensor:
        """Compute log p, without gradients."""
        return self._log_joint(*z)[0]

    def log_joint_and_score(self, z: Coordinates) -> tuple[Tensor, Coordinates]:
        """Compute log p and ∇ log p."""
        value, *score = self._log_joint_and_score(*z)
        return value, tuple(score)


def _flat(value: Tensor, score: Coordinates) -> Coordinates:
    return value, *score
