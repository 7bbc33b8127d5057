"""What a declared object goes by, written as a text that is equal in every process.

Of two processes that declare the same, none may write an address, the order of a hash, or what was
filled in by use. Of objects of other packages no more is written than their class, as only these
know what is declared of them; records, containers and functions among them are looked into.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import itertools
import json
import operator
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from enum import Enum
from types import (
    BuiltinFunctionType,
    CodeType,
    FunctionType,
    MappingProxyType,
    MethodType,
    MethodWrapperType,
    ModuleType,
)
from typing import Any

import numpy as np

from megadask.fingerprints.changes import Changes, Met
from megadask.fingerprints.codes import Kind, Names, names_of, source_of
from megadask.fingerprints.members import (
    closure_of,
    defaults_of,
    is_dunder,
    members_of,
    state_of,
)
from megadask.fingerprints.values import (
    all_plain,
    attribute,
    fields_of,
    is_a,
    is_own,
    plain_text,
    qualified_name,
    type_name,
)

#: How deep objects are looked into; deeper ones count by their class.
_MOST_DEPTH = 40
#: Most functions that are looked into; further ones count by their name.
_MOST_FUNCTIONS = 1000
#: Longer texts are hashed.
_MOST_TEXT = 200
#: Of the standard library: what is pickled of them is all that they are.
_RECORDS = (operator.attrgetter, operator.itemgetter, operator.methodcaller, slice)
_CACHED: type = type(functools.lru_cache(maxsize=1)(lambda: None))


class Encoder:
    """Writes texts of declared objects.

    Parameters
    ----------
    changes
        What to leave out.

    Attributes
    ----------
    met
        The functions that were met on the way.
    numbers
        By name, the numbers that what was written goes by itself.
    """

    def __init__(self, changes: Changes | None = None) -> None:
        self._changes = changes or Changes()
        self.met: set[Met] = set()
        self.numbers: dict[str, str] = {}
        self._known: dict[int, tuple[Any, str]] = {}  # the objects are held: ids are used again
        self._alone: dict[tuple[int, str, int], tuple[Any, str]] = {}
        self._count = itertools.count()
        self._num_functions = 0
        self._depth = 0
        self._most_depth = _MOST_DEPTH

    def text(self, value: Any, home: str) -> str:
        """Return the text of a value, which code of a module names; never raises.

        An object that was written before goes by a number. Of equal values that cannot be changed
        it is chance which are one object: these go by their text again.
        """
        name = f"a {type_name(value)}"
        try:
            plain = plain_text(value)
        except Exception:  # objects may do anything when they are looked at
            return name
        if plain is not None:
            return _short(plain)
        if self._depth == self._most_depth:
            return name
        if id(value) in self._known:
            return self._known[id(value)][1]
        is_fixed = is_a(value, (tuple, frozenset, CodeType))
        self._known[id(value)] = value, name if is_fixed else f"number {next(self._count)}"
        self._depth += 1
        try:
            text = _short(self._any(value, home))
        except Exception:
            text = name
        self._depth -= 1
        if is_fixed:
            self._known[id(value)] = value, text
        return text

    def text_alone(self, value: Any, home: str) -> str:
        """Return a text of a value that does not depend on what was written before it.

        What has no order is written so, and is ordered by it. It is less deep by half, as what is
        in a set may hold this set.
        """
        if all_plain((value,)) or (type(value) is tuple and all_plain(value)):
            return _short(repr(value))  # there may be many
        key = id(value), home, self._most_depth
        if key not in self._alone:
            inner = Encoder(self._changes)
            inner.met, inner._alone, inner._most_depth = self.met, self._alone, key[2] // 2
            self._alone[key] = value, inner.text(value, home)
        return self._alone[key][1]

    def _any(self, value: Any, home: str) -> str:
        said = own_fingerprint(value)
        if said is not None:
            return f"{type_name(value)} says {said}"
        for kinds, write in _WRITERS:
            if is_a(value, kinds):
                return write(self, value, home)
        if is_own(type(value).__module__, home):
            return self._instance(value, type(value).__module__)
        content = self._content(value, home)
        return self._foreign(value, home) if content is None else f"{type_name(value)}{content}"

    def _function(self, function: FunctionType, home: str) -> str:
        module = str(function.__globals__.get("__name__"))
        names = names_of(function.__code__).settled(function.__globals__)
        parts = {
            "defaults": self._pairs(defaults_of(function, names), home),
            "closure": self._pairs(closure_of(function, names), home),
        }
        if is_own(module, home) and self._num_functions < _MOST_FUNCTIONS:
            self._num_functions += 1
            outer, _, name = function.__qualname__.rpartition(".")
            is_method = bool(outer) and not outer.endswith("<locals>")
            self.met.add(Met(name, module, names, is_method))
            parts["code"] = self._code(function.__code__, module)
            parts["globals"] = self._pairs(self._globals(function, names, module), module)
            fields = {key: one for key, one in vars(function).items() if key != "__wrapped__"}
            parts["fields"] = self._pairs(self._kept("attribute", fields), module)
        return f"function {module}.{function.__qualname__}{parts}"

    def _code(self, code: CodeType, home: str) -> str:
        source = source_of(code)
        return self._bytecode(code, home) if source is None else source

    def _bytecode(self, code: CodeType, home: str) -> str:
        names = (code.co_names, code.co_varnames, code.co_freevars)
        consts = [
            self._bytecode(const, home) if is_a(const, CodeType) else self.text(const, home)
            for const in code.co_consts
        ]
        return f"{code.co_code.hex()} {names} {consts}"

    def _globals(
        self, function: FunctionType, names: Names, module: str
    ) -> Iterator[tuple[str, Any]]:
        """Yield what a function reads of its module, and of modules of the same author."""
        for head, *rest in sorted(names.reads):
            if head not in function.__globals__ or is_dunder(head):
                continue
            value, path = function.__globals__[head], head
            if self._changes.has("global", f"{module}:{head}", value):
                continue
            while rest and is_a(value, ModuleType) and is_own(value.__name__, module):
                path = f"{path}.{rest[0]}"
                value = attribute(value, rest.pop(0))
            yield path, value

    def _class(self, cls: type, home: str) -> str:
        name = qualified_name(cls)
        if not is_own(cls.__module__, home):
            return f"class {name}"
        own = [one for one in cls.__mro__ if is_own(one.__module__, home)]
        bases = [qualified_name(base) for base in cls.__mro__]
        members = {
            f"{one.__qualname__}.{key}": member for one in own for key, member in members_of(one)
        }
        functions = {key: one for key, one in members.items() if is_a(one, FunctionType)}
        others = {key: one for key, one in members.items() if key not in functions}
        kept = [*functions.items(), *self._kept("attribute", others)]
        return f"class {name} {bases}{self._pairs(kept, cls.__module__)}"

    def _instance(self, value: Any, home: str) -> str:
        # Many keys may be of one class.
        text = self.text if self._most_depth == _MOST_DEPTH else self.text_alone
        pairs = self._pairs(self._kept("attribute", state_of(value)), home)
        return f"{text(type(value), home)}{pairs}{self._content(value, home)}"

    def _foreign(self, value: Any, home: str) -> str:
        """Write an object of another package: what is known of its kind, and its functions."""
        is_wrapped = hasattr(type(value), "backend_tokenizer")  # of transformers
        backend = value.backend_tokenizer if is_wrapped else value
        if type(backend).__module__.partition(".")[0] == "tokenizers":
            return f"{type_name(value)} {tokenizer_digest(backend)}"
        fields = fields_of(value)
        if fields is None:
            held = attribute(value, "__dict__") or {}
            callables = (FunctionType, MethodType, functools.partial)
            fields = {key: one for key, one in held.items() if is_a(one, callables)}
        return f"{type_name(value)}{self._pairs(fields.items(), home)}"

    def _content(self, value: Any, home: str) -> str | None:
        """Write what a container holds; None for what is no container."""
        if is_a(value, (dict, MappingProxyType)):
            items = f"{{{self._items(value, home)}}}"
            if is_a(value, defaultdict):
                return f"{items} or {self.text(value.default_factory, home)}"
            return items
        if is_a(value, (list, tuple, deque)):
            most = f" of {value.maxlen}" if is_a(value, deque) else ""
            if all_plain(value):
                return f"{list(value)!r}{most}"
            return f"[{', '.join(self.text(one, home) for one in value)}]{most}"
        if is_a(value, (set, frozenset)):
            return f"{{{', '.join(sorted(self.text_alone(one, home) for one in value))}}}"
        return None

    def _items(self, value: Mapping[Any, Any], home: str) -> str:
        """Write the items of a dict: sorted, as their order may come of a set."""
        if is_a(value, OrderedDict):
            items = [f"{self.text_alone(k, home)}: {self.text(v, home)}" for k, v in value.items()]
            return f"in order {', '.join(items)}"
        if all_plain(value) and all_plain(value.values()):
            return repr(sorted((repr(key), repr(one)) for key, one in value.items()))
        keys = [(self.text_alone(key, home), key) for key in value]
        times = Counter(text for text, _ in keys)
        items = []
        for text, key in sorted(keys, key=operator.itemgetter(0)):
            # Where keys have the same text, nothing tells which of their values to write first.
            written = self.text if times[text] == 1 else self.text_alone
            items.append(f"{text}: {written(value[key], home)}")
        return ", ".join(sorted(items))

    def _kept(self, kind: Kind, values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
        """Yield the values that were declared, and are not of use."""
        for name, value in values.items():
            if not self._changes.has(kind, name.rpartition(".")[2], value):
                yield name, value

    def _pairs(self, values: Iterable[tuple[str, Any]], home: str) -> str:
        texts = []
        for name, value in sorted(values, key=operator.itemgetter(0)):
            if self._depth == 1 and type(value) in (bool, int, float):
                self.numbers[name] = repr(value)
            texts.append(f"{name}={self.text(value, home)}")
        return f"({', '.join(texts)})"

    def _partial(self, value: functools.partial[Any], home: str) -> str:
        kind = type(value).__name__
        bound = self._pairs(value.keywords.items(), home)
        return f"{kind}({self.text(value.func, home)}, {self.text(value.args, home)}, {bound})"

    def _method(self, value: MethodType, home: str) -> str:
        return f"method({self.text(value.__func__, home)}, {self.text(value.__self__, home)})"

    def _builtin(self, value: Any, home: str) -> str:
        of = getattr(value, "__self__", None)
        bound = "" if of is None or is_a(of, ModuleType) else self.text(of, home)
        return f"builtin {qualified_name(value)}({bound})"

    def _record(self, value: Any, home: str) -> str:
        return f"{type_name(value)}{self.text(value.__reduce__(), home)}"

    def _enum(self, value: Enum, home: str) -> str:
        return f"{type_name(value)}.{value.name}={self.text(value.value, home)}"

    def _array(self, value: Any, home: str) -> str:
        """Write an array of objects, or one with a mask, under which it may hold anything."""
        kind = f"array({value.dtype}, {value.shape}"
        if not is_a(value, np.ma.MaskedArray):
            return f"{kind}, {self.text(value.tolist(), home)})"
        parts = [value.filled(), np.ma.getmaskarray(value), value.fill_value]
        return f"{kind}, masked {self.text(parts, home)})"


_Writer = Callable[[Encoder, Any, str], str]
_WRITERS: tuple[tuple[Any, _Writer], ...] = (
    (type, Encoder._class),
    (FunctionType, Encoder._function),
    (MethodType, Encoder._method),
    ((functools.partial, functools.partialmethod), Encoder._partial),
    (_CACHED, lambda encoder, value, home: encoder.text(value.__wrapped__, home)),
    ((BuiltinFunctionType, MethodWrapperType), Encoder._builtin),
    (_RECORDS, Encoder._record),
    (Enum, Encoder._enum),
    (np.ndarray, Encoder._array),
    (ModuleType, lambda encoder, value, home: f"module {value.__name__}"),
    (CodeType, Encoder._code),
)


def own_fingerprint(value: Any) -> str | None:
    """Return what an object says of itself; None where it does not say it."""
    try:
        if isinstance(value, type) or inspect.getattr_static(value, "fingerprint", None) is None:
            return None
        said = value.fingerprint()
        return said if isinstance(said, str) else None
    except Exception:  # a method of this name that is something else
        return None


def tokenizer_digest(backend: Any) -> str:
    """Return a hash of a tokenizer of Hugging Face, without what a call sets for itself."""
    saved = json.loads(backend.to_str())
    for name in ("padding", "truncation"):
        saved.pop(name, None)
    return hashlib.sha256(json.dumps(saved, sort_keys=True).encode()).hexdigest()


def _short(text: str) -> str:
    if len(text) <= _MOST_TEXT:
        return text
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()
