"""The errors of the running service. All of them survive pickling."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from typing import TypeVar

from megadask.planner.errors import MegaDaskError

T = TypeVar("T")


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


#: What says of a role or a service that it is over.
_OURS = StaleError | ClosedError


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


def in_user_code(call: Callable[[], T], what: str, where: str) -> T:
    """Call code of a user, who is told where it raised what it raised.

    It may raise anything. What would end a thread or the worker becomes a ServiceError that tells
    of it; and so does what says, among ours, that a service is closed or a role was replaced.
    """
    try:
        return call()
    except BaseException as error:
        if isinstance(error, Exception) and not isinstance(error, StopIteration | _OURS):
            raised = noted(error, where)
        else:
            raised = noted(ServiceError(f"{what} must not raise this", got=told(error)), where)
        if raised is error:
            raise
        raise raised from error


def travelling(error: BaseException) -> Exception:
    """Return an error that means the same in another process.

    That is the error itself, or a SourceError that describes it: where it does not pickle, or says
    something else behind that; and where it would look like a loader or a connection that was lost,
    as an OSError of somebody's transform does. What it was raised from goes along where all of that
    pickles, too.
    """
    is_taken = isinstance(error, OSError | _OURS)
    if not isinstance(error, Exception) or is_taken or not _pickles(error):
        notes = "".join(f"\n{note}" for note in getattr(error, "__notes__", ()))
        return SourceError(f"{told(error)}{notes}")
    if not all(map(_pickles, _causes(error))):
        error.__cause__ = error.__context__ = None
    return error


def pack_error(error: BaseException) -> bytes:
    """Return an error as bytes for another process; one that does not pickle is described."""
    return pickle.dumps(error if _pickles(error) else travelling(error))


def _causes(error: BaseException) -> Iterator[BaseException]:
    """Yield the errors that one was raised from or beside."""
    met: set[int] = {id(error)}
    ahead = [error.__cause__, error.__context__]
    while ahead:
        one = ahead.pop()
        if one is not None and id(one) not in met:
            met.add(id(one))
            yield one
            ahead += [one.__cause__, one.__context__]


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
