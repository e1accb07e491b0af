"""Define tiered_zero's errors. A message says what was expected, what was found, and what to do."""


def add_note(error: BaseException, text: str) -> None:
    """Let Python print `text` below the traceback of `error`, once. Does nothing on Python 3.10, which has no notes."""
    if hasattr(error, "add_note") and text not in getattr(error, "__notes__", ()):
        error.add_note(text)


class TieredZeroError(Exception):
    """The base class of all errors that tiered_zero defines."""


class ConfigError(TieredZeroError, ValueError):
    """The configuration, or an argument, cannot be honoured as written; the message says what to change."""


class PlanError(TieredZeroError):
    """The run does not fit: a tier's budget, the machine's memory or the disk is too small."""


class ModelError(TieredZeroError):
    """The model or its optimizer cannot be used here; the message says why."""


class InternalError(TieredZeroError):
    """tiered_zero has a bug: it broke one of its own rules. The model and the run are not the cause."""


class ParameterOffloadedError(TieredZeroError, RuntimeError):
    """An operation needs a parameter's bytes while they are on another tier. Read them inside
    `tiered_zero.gathered`."""


class BudgetError(TieredZeroError):
    """An allocation needs more bytes than the plan allows or the memory has left."""


class TransferError(TieredZeroError, OSError):
    """A read, write or sync of a file failed, was short, or stalled; the message names the file."""


class StoreError(TieredZeroError):
    """A swap directory, checkpoint or record cannot be used: it is missing, damaged, or not of the expected form."""


class CorruptionError(StoreError):
    """Bytes read back are not the bytes written. No update is computed from such bytes. If the load of a checkpoint
    into an engine raises this, the engine takes no further step."""


class EngineFailedError(TieredZeroError):
    """An earlier failure left state that cannot be trusted; the message says how to go on."""


class RankError(TieredZeroError):
    """Another rank failed, made different calls, or did not answer in time: the run ends on every rank."""


class MissingNameError(TieredZeroError, AttributeError):
    """A script used a name, perhaps DeepSpeed's, that does not exist here; the message says what to do instead."""


class MissingModuleError(TieredZeroError, ModuleNotFoundError):
    """A script imported a module of DeepSpeed that does not exist here; the message says what to do instead."""


class NonFiniteError(TieredZeroError):
    """Training cannot go on, because the gradients of many steps, or the loss, are not finite."""
