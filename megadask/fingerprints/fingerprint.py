"""The fingerprint of a declared value: a transform, a cost, a schedule, a whole strategy.

It covers plain values, the code of functions, and what that code goes by: closures, defaults,
globals, the attributes of objects, and the functions and classes of its own author that it names.
What code changes while it runs (a cache, a counter, a tokenizer that is loaded when first needed)
is left out: it is of the process, not of the declaration.
"""

from __future__ import annotations

import functools
import hashlib
from types import MethodType
from typing import Any

from megadask.fingerprints.changes import changes_of
from megadask.fingerprints.encoder import Encoder, own_fingerprint
from megadask.fingerprints.values import attribute, is_a, qualified_name, type_name

#: Most characters of the numbers that are shown.
_MOST_SHOWN = 200


def fingerprint(value: Any) -> str:
    """Return a text that differs where what was declared does, as far as can be seen.

    That is its own ``fingerprint()`` where it has one. Else it is a name, the numbers that it goes
    by, and a hash of its code and of all values that this goes by. Never raises.

    The order of a dict does not count, as it may come of a set, which has another one in every
    process; that of an ``OrderedDict`` does.

    Parameters
    ----------
    value
        Anything; None for what is not declared.
    """
    try:
        said = own_fingerprint(value)
        return _written(value) if said is None else said
    except Exception:  # objects may do anything when they are looked at
        return type_name(value)


def _written(value: Any) -> str:
    home = _home(value)
    first = Encoder()
    first.text(value, home)
    encoder = Encoder(changes_of(first.met))
    text = encoder.text(value, home)
    shown = ", ".join(f"{name}={number}" for name, number in sorted(encoder.numbers.items()))
    digest = hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()[:16]
    name = f"{_name(value)}({shown[:_MOST_SHOWN]})" if shown else _name(value)
    return f"{name}@{digest}"


def _home(value: Any) -> str:
    """Return the module that a value is of: whose author is meant."""
    if is_a(value, functools.partial):
        return _home(value.func)
    if is_a(value, MethodType):
        return _home(value.__self__)
    is_named = attribute(value, "__qualname__") is not None
    return str(attribute(value if is_named else type(value), "__module__"))


def _name(value: Any) -> str:
    if is_a(value, functools.partial):
        return f"partial({_name(value.func)})"
    if is_a(value, MethodType):
        return f"{type_name(value.__self__)}.{attribute(value, '__name__')}"
    return qualified_name(value)
