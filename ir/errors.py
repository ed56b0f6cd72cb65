"""The one tree of exceptions a user can meet. Every message says: expected, found, where, what to do."""

__all__ = [
    "CaptureError",
    "ClusterError",
    "DiskError",
    "GraphError",
    "InfeasibleError",
    "InputError",
    "PlanError",
    "RuleError",
    "ShardwrightError",
    "StalePlanError",
    "TargetError",
    "TextError",
]


class ShardwrightError(Exception):
    """Root of all errors that are the user's to mend; the command line prints it without a traceback."""


class TextError(ShardwrightError):
    """A graph, plan or cluster text that cannot be read; the message shows the line with a caret."""


class GraphError(ShardwrightError):
    """A graph that breaks a rule of the IR."""


class ClusterError(ShardwrightError):
    """A cluster description that is unknown or incomplete."""


class DiskError(ShardwrightError):
    """The disk tier's file cannot be made, written or read; parameters and optimizer state are as they were."""


class PlanError(ShardwrightError):
    """A plan that is not legal, or no longer fits."""


class StalePlanError(PlanError):
    """A plan made for something else: the message names the fields that differ."""


class TargetError(ShardwrightError):
    """A TARGET that cannot be imported, raises, or returns the wrong thing."""


class CaptureError(ShardwrightError):
    """A model that cannot be captured; names module path and source line."""


class RuleError(ShardwrightError):
    """An operator without a sharding rule."""


class InputError(ShardwrightError):
    """Inputs at run time that are not what was planned."""


class InfeasibleError(ShardwrightError):
    """No plan fits the budget; carries one that would do."""

    def __init__(self, message: str, smallest_bytes: int = 0) -> None:
        super().__init__(message)
        self.smallest_bytes = smallest_bytes
        """The smallest budget that is known to work."""
