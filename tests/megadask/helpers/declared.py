"""Transforms to take fingerprints of, as texts of modules."""

from __future__ import annotations

#: Each declares a transform ``t`` that goes by the number LIMIT. A line ``USE`` ends what is
#: declared: what follows is done with it before it is declared again in the same process.
DECLARED = {
    "a constant": "def t(record): return record['tokens'][:LIMIT]",
    "a lambda": "t = lambda record: record['tokens'][:LIMIT]",
    "one of several lambdas of a line": (
        "t = {50: lambda r: r['tokens'][:50], 57: lambda r: r['tokens'][:57]}[LIMIT]"
    ),
    "a closure": """
def make(limit):
    def cut(record): return record['tokens'][:limit]
    return cut
t = make(LIMIT)
""",
    "a closure of a closure": """
def make(limit):
    def inner(tokens): return tokens[:limit]
    return lambda record: inner(record['tokens'])
t = make(LIMIT)
""",
    "a default": "t = (lambda n: (lambda record, limit=n: record['tokens'][:limit]))(LIMIT)",
    "a keyword default": (
        "t = (lambda n: (lambda record, *, limit=n: record['tokens'][:limit]))(LIMIT)"
    ),
    "a global": "limit = int('LIMIT')\ndef t(record): return record['tokens'][:limit]",
    "a global of a comprehension": """
limit = int('LIMIT')
def t(record): return [x for row in record for x in (lambda r: r[:limit])(row)]
""",
    "a function of the module": """
limit = int('LIMIT')
def cut(tokens): return tokens[:limit] if tokens else t({'tokens': tokens})
def t(record): return cut(record['tokens'])
""",
    "the code of a function of the module": """
def cut(tokens): return tokens[:LIMIT]
def t(record): return cut(record['tokens'])
""",
    "a function of the package": "from .helper import cut\ndef t(r): return cut(r['tokens'])",
    "a module of the package": "from . import helper\ndef t(r): return r[:helper.limit]",
    "a module beside the package": "import beside\ndef t(r): return beside.cut(r)",
    "a value from elsewhere": "from beside import limit\ndef t(r): return r[:limit]",
    "an attribute": """
class Cut:
    def __init__(self, limit): self.limit = limit
    def __call__(self, record): return record['tokens'][:self.limit]
t = Cut(LIMIT)
""",
    "an attribute that a method of __init__ sets": """
class Cut:
    def __init__(self, limit): self._set(limit)
    def _set(self, limit): self.limit = limit
    def __call__(self, record): return record['tokens'][:self.limit]
t = Cut(LIMIT)
""",
    "an attribute that was set": """
class Cut:
    limit = 3
    def set(self, limit): self.limit = limit
    def __call__(self, record): return record['tokens'][:self.limit]
t = Cut()
t.set(LIMIT)
""",
    "a slot": """
class Cut:
    __slots__ = ('limit',)
    def __init__(self, limit): self.limit = limit
    def __call__(self, record): return record['tokens'][:self.limit]
t = Cut(LIMIT)
""",
    "an attribute of a class": """
class Cut:
    limit = LIMIT
    def __call__(self, record): return record['tokens'][:self.limit]
t = Cut()
""",
    "an attribute of a base": """
class Base:
    limit = LIMIT
class Cut(Base):
    def __call__(self, record): return record['tokens'][:self.limit]
t = Cut()
""",
    "the code of a method": """
class Cut:
    def __call__(self, record): return self._cut(record['tokens'])
    def _cut(self, tokens): return tokens[:LIMIT]
t = Cut()
""",
    "the code of a property": """
class Cut:
    @property
    def limit(self): return LIMIT
    def __call__(self, record): return record['tokens'][:self.limit]
t = Cut()
""",
    "a bound method": """
class Cut:
    def __init__(self, limit): self.limit = limit
    def cut(self, record): return record['tokens'][:self.limit]
t = Cut(LIMIT).cut
""",
    "an object of an object": """
class Cut:
    def __init__(self, limit): self.limit = limit; self.self = self
class Outer:
    def __init__(self, inner): self.inner = [{'a': (inner, self)}]
    def __call__(self, record): return record['tokens'][:self.inner[0]['a'][0].limit]
t = Outer(Cut(LIMIT))
""",
    "a dataclass": """
from dataclasses import dataclass
@dataclass
class Cut:
    limit: int
    def __call__(self, record): return record['tokens'][:self.limit]
t = Cut(LIMIT)
""",
    "a frozen dataclass with slots": """
from dataclasses import dataclass
@dataclass(frozen=True, slots=True)
class Cut:
    limit: int
    def __call__(self, record): return record['tokens'][:self.limit]
t = Cut(LIMIT)
""",
    "a partial": """
from functools import partial
def cut(record, limit): return record['tokens'][:limit]
t = partial(cut, limit=LIMIT)
""",
    "a partial in a chain": """
import megadask as md
from functools import partial
def cut(limit, record): return record['tokens'][:limit]
t = md.transforms.Chain(partial(cut, LIMIT), dict)
""",
    "a decorated function": """
import functools
def twice(function):
    @functools.wraps(function)
    def call(record): return function(function(record))
    return call
limit = int('LIMIT')
@twice
def t(record): return {'tokens': record['tokens'][:limit]}
""",
    "a cached function": """
import functools
limit = int('LIMIT')
@functools.lru_cache
def cut(tokens): return tokens[:limit]
def t(record): return cut(tuple(record['tokens']))
USE
t({'tokens': [1]})
""",
    "a list": "limits = [1, [LIMIT]]\ndef t(r): return r[:limits[1][0]]",
    "a dict": "options = {'limit': LIMIT, 'f': len}\ndef t(r): return r[:options['limit']]",
    "a dict that is read beside others that are filled": """
options = {'limit': LIMIT}
def t(record):
    sample = {}
    sample['tokens'] = record['tokens'][:options['limit']]
    return sample
""",
    "a set": """
words = {'a', 'b', 'c', ('d', 'e'), LIMIT, len}
def t(record): return record if record in words else None
""",
    "a constant set": "def t(r): return r if r in {'a', 'b', 'c', LIMIT} else None",
    "a set in a lambda": "t = lambda r: r if r in {'a', 'b', 'c', LIMIT} else None",
    "an array": "import numpy as np\ntable = np.arange(LIMIT)\ndef t(r): return table[r]",
    "a number of numpy": "import numpy as np\nlimit = np.int64(LIMIT)\ndef t(r): return r[:limit]",
    "a regex": "import re\nword = re.compile('a{LIMIT}')\ndef t(r): return word.match(r['text'])",
    "a path": "import pathlib\npath = pathlib.Path('LIMIT.txt')\ndef t(r): return path.open()",
    "an enum": """
from enum import Enum
class Limit(Enum):
    short = 50
    long = 57
limit = Limit(LIMIT)
def t(record): return record['tokens'][:limit.value]
""",
    "a named tuple": """
from collections import namedtuple
options = namedtuple('Options', 'limit')(LIMIT)
def t(record): return record['tokens'][:options.limit]
""",
    "a namespace": """
from argparse import Namespace
args = Namespace(limit=LIMIT)
def t(record): return record['tokens'][:args.limit]
""",
    "a bound builtin": """
t = {'limit': LIMIT}.get
""",
    "an object with a fingerprint": """
class Encoder:
    def fingerprint(self): return 'LIMIT'
encoder = Encoder()
def t(record): return encoder.encode(record['text'])
""",
    "a fingerprint of its own": """
import os
class Cut:
    def __init__(self): self.pid = os.getpid()
    def fingerprint(self): return 'LIMIT'
    def __call__(self, record): return record['tokens'][:LIMIT]
t = Cut()
""",
    "an object that is filled by use": """
import functools
class Cut:
    def __init__(self, limit):
        self.limit, self.seen, self.count, self.loaded = limit, {}, 0, None
    @functools.cached_property
    def twice(self): return 2 * self.limit
    def _load(self): self.loaded = object(); self.more = 3
    def __call__(self, record):
        self._load()
        self.count += 1
        self.seen[record['id']] = self.twice
        self.seen.setdefault('all', []).append(record['id'])
        return record['tokens'][:self.limit]
t = Cut(LIMIT)
USE
t({'id': 4, 'tokens': [1]})
""",
    "a module that is filled by use": """
limit, table, cache, known = int('LIMIT'), None, {}, set()
def load():
    global table
    table = [limit]
def t(record):
    if table is None: load()
    cache[record['id']] = cache.get(record['id'], 0) + 1
    known.add(record['id'])
    return record['tokens'][:table[0]]
USE
t({'id': 4, 'tokens': [1]})
""",
    "a closure that is filled by use": """
def make(limit):
    seen, count = {}, 0
    def t(record):
        nonlocal count
        count += 1
        seen[count] = record
        return record['tokens'][:limit]
    return t
t = make(LIMIT)
USE
t({'id': 4, 'tokens': [1]})
""",
    "an object that pickles as something else": """
import os
class Cut:
    def __init__(self, limit): self.limit, self.pid = limit, os.getpid()
    def __getstate__(self): return {'limit': self.limit}
    def __call__(self, record): return record['tokens'][:self.limit]
t = Cut(LIMIT)
""",
    "things that do not count": """
import logging, threading, os, random, re
limit, log, lock, file = int('LIMIT'), logging.getLogger('a'), threading.Lock(), open(os.devnull)
nothing, rng = object(), random.Random()
def t(record):
    with lock:
        log.info('%s %s %s', re.sub('a', 'b', 'c'), file.read(), rng.random())
        return record['tokens'][:limit] if nothing else os.environ
USE
t({'tokens': [1]})
""",
}
