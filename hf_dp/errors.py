"""Every error that hf_dp raises on purpose.

All derive from :class:`HfDpError`, so one ``except`` catches the library; each also derives from
the built-in error a Python user would expect, so code that does not know hf_dp still handles it.
"""

from __future__ import annotations


class HfDpError(Exception):
    """Base class of all errors raised by hf_dp."""


class InvalidArgumentError(HfDpError, ValueError):
    """A value is out of range or of the wrong kind; the message names argument and next move."""


class UnsupportedArgumentError(InvalidArgumentError):
    """A setting that ``transformers`` allows, but that would break this run's statement."""


class UnknownArgumentError(InvalidArgumentError, TypeError):
    """A name that no argument has; the message suggests the nearest that one has."""


class UnsupportedModelError(HfDpError, ValueError):
    """The model couples examples, has a trainable parameter whose per-example gradient is not
    known, or was trained by what the statement would not count."""


class UnsupportedLossError(HfDpError, ValueError):
    """No per-example loss is known for this model and these labels."""


class UnsupportedEventError(HfDpError, ValueError):
    """An accountant was handed an event it cannot describe exactly."""


class AccountingRangeError(HfDpError, ValueError):
    """The accountant is not known to be right here; the message names one that is."""


class CalibrationError(HfDpError, ValueError):
    """No noise (or number of steps) meets the target."""


class DataError(HfDpError, ValueError):
    """A data set, file or collator cannot be used for private training."""


class SharedStateError(DataError):
    """A row changed what later rows are read with."""


class MetricUnavailableError(HfDpError, RuntimeError):
    """A metric cannot be computed here; the message says what is missing."""


class ConfigError(HfDpError, ValueError):
    """A configuration file has an unknown key or an unreadable value."""


class LedgerError(HfDpError, RuntimeError):
    """The ledger of a run is missing, damaged, or belongs to another run."""


class OutputError(HfDpError, OSError):
    """A file of a run cannot be written: the disk is full, or the folder is not writable."""


class MemoryShortError(HfDpError, MemoryError):
    """Memory ran out while a logical batch was computed; nothing of it was released."""


class StepError(HfDpError, RuntimeError):
    """A step failed before its release; the message says what is spent, and where weights are."""


class BudgetExceededError(HfDpError, RuntimeError):
    """The next release would pass the target epsilon."""


class UnaccountedGradientError(HfDpError, RuntimeError):
    """Autograd reached a trainable parameter on a path that does not pass the clipping engine."""


class SelfCheckError(HfDpError, RuntimeError):
    """On synthetic examples the engine disagreed with one-by-one gradients; nothing was trained."""


class DoesNotFitError(HfDpError, MemoryError):
    """Not even one example fits into the memory."""


class AuditError(HfDpError, RuntimeError):
    """An audit refutes what a run claims. Its folder is complete, and says so."""


class DistributedError(HfDpError, RuntimeError):
    """The processes of a run disagree, or one of them failed or ended."""


class PublishError(HfDpError, RuntimeError):
    """A folder cannot be published as it is, or the Hub did not take it; the message says what to
    do. It never holds a token."""


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an allocation failed, on the device or on the host."""
    import torch  # only here: errors are imported where torch is not

    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    # torch on the CPU, CUDA, cuBLAS and cuDNN
    signs = ("can't allocate memory", "not enough memory", "out of memory", "alloc_failed")
    return isinstance(error, RuntimeError) and any(sign in str(error).lower() for sign in signs)
