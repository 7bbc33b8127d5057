"""A text that differs where the results of a transform would, equal in every process.

It covers the code of a transform, and what that code goes by: closures, defaults, globals, the
attributes of objects, and the functions and classes of its own author that it names. What the code
itself changes while it runs (a cache, a counter, a tokenizer that is loaded when first needed) is
left out: it is of the process, not of the declaration.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Sequence
from types import MethodType
from typing import Any

from megadask.transforms.codes import Kind
from megadask.transforms.declared import Changes, Encoder, Met, own_fingerprint
from megadask.transforms.values import attribute, qualified_name, type_name

#: Methods that make an object: what they assign is declared.
_MAKING = {"__init__", "__new__", "__post_init__", "__init_subclass__", "__setstate__"}
#: Most characters of the numbers that are shown.
_MOST_SHOWN = 200


def transform_fingerprint(transform: Any) -> str:
    """Return a text that differs where the results of a transform would, as far as can be seen.

    That is its own ``fingerprint()`` where it has one. Else it is a name, the numbers that it goes
    by, and a hash of its code and of all values that this goes by.

    Parameters
    ----------
    transform
        Any callable, or None.
    """
    said = own_fingerprint(transform)
    if said is not None:
        return said
    home = _home(transform)
    first = Encoder()
    first.text(transform, home)
    encoder = Encoder(_changes(first.met))
    text = encoder.text(transform, home)
    shown = ", ".join(f"{name}={value}" for name, value in sorted(encoder.numbers.items()))
    digest = hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()[:16]
    name = f"{_name(transform)}({shown[:_MOST_SHOWN]})" if shown else _name(transform)
    return f"{name}@{digest}"


def _changes(met: Sequence[Met]) -> Changes:
    """Return what functions change when the transform is used, rather than made."""
    used = [one for one in met if not one.is_method or _is_entry(one.name)]
    rest = [one for one in met if one not in used]
    while True:
        mentioned = {name for one in used for name in one.names.mentions}
        more = [one for one in rest if one.name in mentioned]
        if not more:
            break
        used += more
        rest = [one for one in rest if one.name not in mentioned]
    assigned = {_key(one, *named) for one in used for named in one.names.assigns}
    filled = {_key(one, *named) for one in used for named in one.names.fills}
    return Changes(assigned, filled)


def _key(met: Met, kind: Kind, name: str) -> tuple[Kind, str]:
    return kind, f"{met.module}:{name}" if kind == "global" else name


def _is_entry(name: str) -> bool:
    """Whether a method of this name is called from elsewhere when an object is used."""
    is_dunder = name.startswith("__") and name.endswith("__")
    return name in ("batch", "<lambda>") or (is_dunder and name not in _MAKING)


def _home(transform: Any) -> str:
    """Return the module that a transform is of."""
    if isinstance(transform, functools.partial):
        return _home(transform.func)
    if isinstance(transform, MethodType):
        return _home(transform.__self__)
    is_named = attribute(transform, "__qualname__") is not None
    return str(attribute(transform if is_named else type(transform), "__module__"))


def _name(transform: Any) -> str:
    if isinstance(transform, functools.partial):
        return f"partial({_name(transform.func)})"
    if isinstance(transform, MethodType):
        return f"{type_name(transform.__self__)}.{transform.__name__}"
    return qualified_name(transform)
