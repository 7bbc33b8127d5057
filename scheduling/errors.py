"""The errors of the running service. All of them survive pickling."""

from __future__ import annotations

import pickle

from megadask.planner.errors import MegaDaskError


class ServiceError(MegaDaskError, RuntimeError):
    """The service cannot do what was asked, or has failed."""


class ClosedError(ServiceError):
    """The service is closed; the message says by whom or why."""


class StaleError(ServiceError):
    """A planner, loader, constructor or trainer of an earlier life spoke up; it is ignored."""


class ClaimError(ServiceError):
    """A rank belongs to another trainer."""


class ReshardedError(ServiceError):
    """The pipeline has another topology from here on; ranks have to connect again."""


class WorkerError(ServiceError):
    """A Dask worker cannot run MegaDask."""


class LostError(ServiceError):
    """A Dask worker went away, or fell silent, while something was asked of it."""


class SourceError(ServiceError):
    """A source cannot be read, or reads differently than before."""


class JournalError(ServiceError):
    """The checkpoint path holds something that cannot be continued."""


class DeadlineError(MegaDaskError, TimeoutError):
    """A wait reached its deadline; the message says what it waited for."""


def root_error(error: Exception) -> Exception:
    """Return the error of the first task that failed, out of the group that a TaskGroup raises.

    A group with a note is no such one: user code raised it, and the note says where.
    """
    while isinstance(error, ExceptionGroup) and not getattr(error, "__notes__", None):
        error = error.exceptions[0]
    return error


def told(error: BaseException) -> str:
    """Return the class of an error and what it says, for people.

    Errors of user code may fail at that, too: of these only the class is told.
    """
    name = type(error).__name__
    try:
        return f"{name}: {error}"
    except BaseException as failed:  # the user's code may raise anything
        return f"{name}: (its text cannot be had: {type(failed).__name__})"


def noted(error: Exception, note: str) -> Exception:
    """Return an error with a note: itself, or a SourceError where it takes none."""
    try:
        error.add_note(note)
    except Exception:  # a frozen one, for instance
        told_of = SourceError(told(error))
        told_of.add_note(note)
        return told_of
    return error


def travelling(error: BaseException) -> Exception:
    """Return an error that means the same in another process.

    That is the error itself, or a SourceError that describes it: where it does not pickle, or says
    something else behind that; and where it would look like a loader or a connection that was lost,
    as an OSError of somebody's transform does.
    """
    if isinstance(error, Exception) and not isinstance(error, OSError) and _pickles(error):
        return error
    notes = "".join(f"\n{note}" for note in getattr(error, "__notes__", ()))
    return SourceError(f"{told(error)}{notes}")


def pack_error(error: BaseException) -> bytes:
    """Return an error as bytes for another process; one that does not pickle is described."""
    return pickle.dumps(error if _pickles(error) else travelling(error))


def _pickles(error: BaseException) -> bool:
    """Whether an error comes back as it was; those of Unicode lose what they say."""
    try:
        return str(pickle.loads(pickle.dumps(error))) == str(error)
    except BaseException:  # any class may fail to pickle in any way, or to be told
        return False


def unpack_error(data: bytes) -> Exception:
    """Invert `pack_error`."""
    error = pickle.loads(data)
    return error if isinstance(error, Exception) else ServiceError(told(error))
