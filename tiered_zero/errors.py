"""Define the one family of errors. A message says what was expected, what was found, and what to do."""


def add_note(error: BaseException, text: str) -> None:
    """Show `text` below the traceback of `error`, once. Python 3.10 has no notes."""
    if hasattr(error, "add_note") and text not in getattr(error, "__notes__", ()):
        error.add_note(text)


class TieredZeroError(Exception):
    """Base of every error that tiered_zero raises on purpose."""


class ConfigError(TieredZeroError, ValueError):
    """The configuration cannot be honoured as written; raised before anything is allocated or written."""


class PlanError(TieredZeroError):
    """The run does not fit: a tier's budget, the machine's memory or the disk is too small."""


class ModelError(TieredZeroError):
    """The model (or the optimizer over it) is not one that can be trained here; the message says why."""


class InternalError(TieredZeroError):
    """A rule of tiered_zero's own is broken: an error in this package, not in the model or the run."""


class ParameterOffloadedError(TieredZeroError, RuntimeError):
    """A parameter's bytes were read while they are on another tier. Read them inside `tiered_zero.gathered`."""


class BudgetError(TieredZeroError):
    """An allocation would pass the limit of its tier: the run left its plan."""


class TransferError(TieredZeroError, OSError):
    """A read or write failed, was short, or stalled; carries path, offset, bytes wanted and got."""


class StoreError(TieredZeroError):
    """A swap directory, its manifest or its contents are not what they must be."""


class UntaggedCommitError(StoreError):
    """A step is committed in place, but its tag is not durable. `step`: that step."""

    def __init__(self, message: str, step: int | None = None) -> None:
        super().__init__(message)
        self.step = step


class CorruptionError(StoreError):
    """Bytes read back are not the bytes written. No update is computed from them. A load that raises this may have put
    them into weights or state, so the engine takes no further step."""


class EngineFailedError(TieredZeroError):
    """An earlier failure left state that cannot be trusted; the message says where to resume from."""


class RankError(TieredZeroError):
    """Another rank failed, made other calls, or did not answer in time: the run ends on every rank."""


class MissingNameError(TieredZeroError, AttributeError):
    """A name that does not exist here, perhaps DeepSpeed's; the message says what to do instead."""


class MissingModuleError(TieredZeroError, ModuleNotFoundError):
    """A module of DeepSpeed that does not exist here; the message says what to do instead."""


class NonFiniteError(TieredZeroError):
    """Training cannot go on: gradients or the loss are not finite, step after step."""
