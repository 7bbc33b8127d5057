"""What a declared object goes by, written as a text that is equal in every process.

Of two processes that declare the same, none may write an address, the order of a hash, or what was
filled in by use. Of objects of other packages no more is written than their class, as only these
know what is declared of them; records, containers and functions among them are looked into.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import json
import operator
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
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

from megadask.fingerprints.changes import Changes, Met
from megadask.fingerprints.codes import Kind, Names, names_of, source_of
from megadask.fingerprints.values import (
    all_plain,
    attribute,
    fields_of,
    flat_text,
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
_GENERATORS = ("__dataclass_fields__", "__attrs_attrs__", "__pydantic_fields__", "_fields")
_GETTERS = (operator.attrgetter, operator.itemgetter, operator.methodcaller)
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
        self.met: list[Met] = []
        self.numbers: dict[str, str] = {}
        self._seen: dict[int, tuple[int, Any]] = {}  # the objects are held: ids are used again
        self._depth = 0

    def text(self, value: Any, home: str) -> str:
        """Return the text of a value, which code of a module names; never raises."""
        try:
            plain = plain_text(value)
        except Exception:  # objects may do anything when they are looked at
            return f"a {type_name(value)}"
        if plain is not None:
            return _short(plain)
        if self._depth == _MOST_DEPTH:
            return f"a {type_name(value)}"
        if not isinstance(value, tuple | frozenset | CodeType):  # equal ones may be one object
            if id(value) in self._seen:
                return f"number {self._seen[id(value)][0]}"
            self._seen[id(value)] = len(self._seen), value
        self._depth += 1
        try:
            return _short(self._any(value, home))
        except Exception:
            return f"a {type_name(value)}"
        finally:
            self._depth -= 1

    def _any(self, value: Any, home: str) -> str:
        said = own_fingerprint(value)
        if said is not None:
            return f"{type_name(value)} says {said}"
        for kinds, write in _WRITERS:
            if isinstance(value, kinds):
                return write(self, value, home)
        if is_own(type(value).__module__, home):
            return self._instance(value, type(value).__module__)
        content = self._content(value, home)
        return self._foreign(value, home) if content is None else f"{type_name(value)}{content}"

    def _function(self, function: FunctionType, home: str) -> str:
        module = str(function.__globals__.get("__name__"))
        names = names_of(function.__code__)
        parts = {
            "defaults": self.text(function.__defaults__, home),
            "keywords": self.text(function.__kwdefaults__, home),
            "closure": self._pairs(_closure(function, names), home),
        }
        if is_own(module, home) and len(self.met) < _MOST_FUNCTIONS:
            outer, _, name = function.__qualname__.rpartition(".")
            is_method = bool(outer) and not outer.endswith("<locals>")
            self.met.append(Met(name, module, names, is_method))
            parts["code"] = self._code(function.__code__, module)
            parts["globals"] = self._pairs(self._globals(function, names, module), module)
            fields = {key: one for key, one in vars(function).items() if key != "__wrapped__"}
            parts["fields"] = self._pairs(self._kept("attribute", fields), module)
        return f"function {module}.{function.__qualname__}{parts}"

    def _code(self, code: CodeType, home: str) -> str:
        source = source_of(code)
        if source is not None:
            return source
        names = (code.co_names, code.co_varnames, code.co_freevars)
        consts = [self.text(const, home) for const in code.co_consts]
        return f"{code.co_code.hex()} {names} {consts}"

    def _globals(
        self, function: FunctionType, names: Names, module: str
    ) -> Iterator[tuple[str, Any]]:
        """Yield what a function reads of its module, and of modules of the same author."""
        for head, *rest in sorted(names.reads):
            if head not in function.__globals__ or _is_dunder(head):
                continue
            value, path = function.__globals__[head], head
            if self._changes.has("global", f"{module}:{head}", value):
                continue
            while rest and isinstance(value, ModuleType) and is_own(value.__name__, module):
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
            f"{one.__qualname__}.{key}": member for one in own for key, member in _members(one)
        }
        functions = {key: one for key, one in members.items() if isinstance(one, FunctionType)}
        others = {key: one for key, one in members.items() if key not in functions}
        kept = [*functions.items(), *self._kept("attribute", others)]
        return f"class {name} {bases}{self._pairs(kept, cls.__module__)}"

    def _instance(self, value: Any, home: str) -> str:
        state = self._kept("attribute", _state(value))
        pairs = self._pairs(state, home)
        return f"{self.text(type(value), home)}{pairs}{self._content(value, home)}"

    def _foreign(self, value: Any, home: str) -> str:
        """Write an object of another package: what is known of its kind, and its functions."""
        is_wrapped = hasattr(type(value), "backend_tokenizer")  # of transformers
        backend = value.backend_tokenizer if is_wrapped else value
        if type(backend).__module__.partition(".")[0] == "tokenizers":
            return f"{type_name(value)} {tokenizer_digest(backend)}"
        fields = fields_of(value)
        if fields is None:
            held = getattr(value, "__dict__", {})
            callables = (FunctionType, MethodType, functools.partial)
            fields = {key: one for key, one in held.items() if isinstance(one, callables)}
        return f"{type_name(value)}{self._pairs(fields.items(), home)}"

    def _content(self, value: Any, home: str) -> str | None:
        """Write what a container holds; None for what is no container."""
        if isinstance(value, dict | MappingProxyType):
            if all_plain(value) and all_plain(value.values()):
                return repr(sorted((repr(key), repr(one)) for key, one in value.items()))
            items = sorted(((flat_text(key), key) for key in value), key=operator.itemgetter(0))
            return f"{{{', '.join(f'{text}: {self.text(value[k], home)}' for text, k in items)}}}"
        if isinstance(value, list | tuple | deque):
            if all_plain(value):
                return repr(list(value))
            return f"[{', '.join(self.text(one, home) for one in value)}]"
        if isinstance(value, set | frozenset):
            return f"{{{', '.join(sorted(map(flat_text, value)))}}}"
        return None

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
        bound = self._pairs(value.keywords.items(), home)
        return f"partial({self.text(value.func, home)}, {self.text(value.args, home)}, {bound})"

    def _method(self, value: MethodType, home: str) -> str:
        return f"method({self.text(value.__func__, home)}, {self.text(value.__self__, home)})"

    def _builtin(self, value: Any, home: str) -> str:
        of = getattr(value, "__self__", None)
        bound = "" if of is None or isinstance(of, ModuleType) else self.text(of, home)
        return f"builtin {qualified_name(value)}({bound})"


_Writer = Callable[[Encoder, Any, str], str]
_WRITERS: tuple[tuple[Any, _Writer], ...] = (
    (type, Encoder._class),
    (FunctionType, Encoder._function),
    (MethodType, Encoder._method),
    (functools.partial, Encoder._partial),
    (_CACHED, lambda encoder, value, home: encoder.text(value.__wrapped__, home)),
    ((BuiltinFunctionType, MethodWrapperType), Encoder._builtin),
    (_GETTERS, lambda encoder, value, home: f"{value.__reduce__()}"),
    (ModuleType, lambda encoder, value, home: f"module {value.__name__}"),
    (CodeType, Encoder._code),
)


def own_fingerprint(value: Any) -> str | None:
    """Return what an object says of itself; None where it does not say it."""
    try:
        if isinstance(value, type) or inspect.getattr_static(value, "fingerprint", None) is None:
            return None
        said = value.fingerprint()
    except Exception:  # a method of this name that is something else
        return None
    return said if isinstance(said, str) else None


def tokenizer_digest(backend: Any) -> str:
    """Return a hash of a tokenizer of Hugging Face, without what a call sets for itself."""
    saved = json.loads(backend.to_str())
    for name in ("padding", "truncation"):
        saved.pop(name, None)
    return hashlib.sha256(json.dumps(saved, sort_keys=True).encode()).hexdigest()


def _closure(function: FunctionType, names: Names) -> Iterator[tuple[str, Any]]:
    """Yield the variables of outer functions, but for those that the function changes."""
    changes = Changes(names.assigns, names.fills)
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            value = cell.cell_contents
        except ValueError:  # not assigned yet
            continue
        if not changes.has("outer", name, value):
            yield name, value


def _members(cls: type) -> Iterator[tuple[str, Any]]:
    """Yield what a class defines: functions, and plain attributes."""
    is_generated = any(hasattr(cls, name) for name in _GENERATORS)
    for name, member in vars(cls).items():
        found = _unwrapped(member)
        if _is_dunder(name):
            if not isinstance(found, FunctionType):
                continue
            if is_generated and source_of(found.__code__) is None:
                continue
        yield name, found


def _unwrapped(member: Any) -> Any:
    if isinstance(member, staticmethod | classmethod):
        return member.__func__
    if isinstance(member, property):
        return member.fget
    return member.func if isinstance(member, functools.cached_property) else member


def _state(value: Any) -> dict[str, Any]:
    """Return the attributes of an object, or what it says that it pickles as."""
    getstate: Any = type(value).__getstate__
    if getstate is not object.__getstate__ and getstate.__module__ != "dataclasses":
        with suppress(Exception):  # it may not pickle before it is used, or for another reason
            state = value.__getstate__()
            return state if isinstance(state, dict) else {"state": state}
    slots = [getattr(cls, "__slots__", ()) for cls in type(value).__mro__]
    names = [name for one in slots for name in ([one] if isinstance(one, str) else one)]
    found = {name: getattr(value, name) for name in names if hasattr(value, name)}
    found.update(getattr(value, "__dict__", {}))
    cached = {
        name
        for cls in type(value).__mro__
        for name, member in vars(cls).items()
        if isinstance(member, functools.cached_property)
    }
    hidden = {"__dict__", "__weakref__", *cached}
    return {name: one for name, one in found.items() if name not in hidden}


def _is_dunder(name: str) -> bool:
    return name.startswith("__") and name.endswith("__")


def _short(text: str) -> str:
    if len(text) <= _MOST_TEXT:
        return text
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()
