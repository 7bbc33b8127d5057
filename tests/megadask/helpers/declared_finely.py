"""Transforms of which fingerprints are easily wrong, as texts of modules."""

from __future__ import annotations

#: As in ``declared.py``: each goes by the number LIMIT.
DECLARED = {
    "lambdas of a line that differ in a generator": """
made = {50: lambda r: sum(x + 50 for x in r), 57: lambda r: sum(x + 57 for x in r)}
t = made[LIMIT]
""",
    "lambdas of a line that differ in a list": """
made = {50: lambda r: [x[:50] for x in r], 57: lambda r: [x[:57] for x in r]}
t = made[LIMIT]
""",
    "lambdas of a line that differ in a lambda": """
made = {50: lambda r: (lambda x: [y[:50] for y in x]), 57: lambda r: (lambda x: [y for y in x])}
t = made[LIMIT]
""",
    "tuples of the same tuples": """
parts = (LIMIT,)
for _ in range(30): parts = (parts, parts)
def t(record): return record['tokens'], parts
""",
    "the order of an ordered dict": """
from collections import OrderedDict
order = OrderedDict(sorted({'a': 50, 'b': 57}.items(), key=lambda item: item[1] != LIMIT))
def t(record): return {name: record[name] for name in order}
""",
    "an array of objects": """
import numpy as np
table = np.array([[1, 2], None, LIMIT], dtype=object)
def t(record): return table[record]
""",
    "the mask of an array": """
import numpy as np
table = np.ma.array([1, 1], mask=[LIMIT == 50, LIMIT == 57])
def t(record): return table[record]
""",
    "a masked array of nothing": """
import numpy as np
table = np.ma.masked_all((2, LIMIT))
def t(record): return table[record]
""",
    "what a dict makes": """
from collections import defaultdict
counts = defaultdict({50: int, 57: list}[LIMIT])
def t(record): return counts.get(record)
""",
    "the most of a deque": """
from collections import deque
window = deque([1], LIMIT)
def t(record): return window.maxlen
""",
    "a set of records of its own": """
from dataclasses import dataclass
@dataclass(frozen=True)
class Word:
    text: str
    rank: int
words = {Word('a', LIMIT), Word('b', 1), Word('c', 2), (Word('d', 3),)}
def t(record): return record if record in words else None
""",
    "a set of functions": """
words = {lambda r: r[:1], lambda r: r[:LIMIT], lambda r: r[:3]}
def t(record): return [word(record) for word in words]
""",
    "keys that are records of its own": """
from dataclasses import dataclass
@dataclass(frozen=True)
class Word:
    text: str
    rank: int
words = {Word(text, LIMIT): Word(text, 1) for text in {'a', 'b', 'c', 'd'}}
def t(record): return words[record]
""",
    "keys that look the same": """
class Word: pass
words = {Word(): [text] for text in {'a', 'b', 'c', 'd'}}
def t(record): return words, LIMIT
""",
    "members that hold the set": """
class Node:
    def __init__(self, number, nodes): self.number, self.nodes = number, nodes
nodes = set()
for number in (1, 2, 3, LIMIT): nodes.add(Node(number, nodes))
def t(record): return nodes
""",
    "an enum of lists": """
from enum import Enum
class Limit(Enum):
    limit = [LIMIT]
limit = Limit.limit
def t(record): return record['tokens'][:limit.value[0]]
""",
    "a private slot": """
class Cut:
    __slots__ = ('__limit',)
    def __init__(self, limit): self.__limit = limit
    def __call__(self, record): return record['tokens'][:self.__limit]
t = Cut(LIMIT)
""",
    "a partial method": """
from functools import partialmethod
class Cut:
    def cut(self, limit, record): return record['tokens'][:limit]
    part = partialmethod(cut, LIMIT)
    def __call__(self, record): return self.part(record)
t = Cut()
""",
    "a partial method that is called": """
from functools import partialmethod
class Cut:
    def cut(self, limit, record): return record['tokens'][:limit]
    __call__ = partialmethod(cut, LIMIT)
t = Cut()
""",
    "a cached call": """
from functools import lru_cache
class Cut:
    @lru_cache
    def __call__(self, record): return record[:LIMIT]
t = Cut()
USE
t('abc')
""",
    "a cached method": """
from functools import lru_cache
class Cut:
    @lru_cache
    def cut(self, record): return record[:LIMIT]
t = Cut().cut
USE
t('abc')
""",
    "a slice": "part = slice(1, LIMIT)\ndef t(record): return record['tokens'][part]",
    "names that are no texts": """
class Cut:
    def __init__(self, limit): self.name = 'a'; self.__dict__[3] = limit
    def __call__(self, record): return record['tokens'][:self.__dict__[3]]
t = Cut(LIMIT)
""",
    "a call of a method by name": """
from operator import methodcaller
t = methodcaller('intersection', {'a', 'b', 'c', 'd', 'LIMIT'})
""",
    "an object that raises when it is looked at": """
class Cut:
    def __getattribute__(self, name): raise RuntimeError(name)
    def __call__(self, record): return record['tokens'][:LIMIT]
cut = Cut()
def t(record): return cut.limit, cut(record)
""",
    "a default that is filled": """
def t(record, limit=LIMIT, cache={}, *, seen=[]):
    cache[record['id']] = 1
    seen.append(record)
    return record['tokens'][:limit]
USE
t({'id': 4, 'tokens': [1]})
""",
    "a default under the name of what is filled": """
def t(record, options={'limit': LIMIT}):
    options = dict(options)
    options['id'] = record['id']
    return record['tokens'][:options['limit']]
USE
t({'id': 4, 'tokens': [1]})
""",
    "what is filled under other names": """
import heapq
class Cut:
    def __init__(self, limit):
        self.limit, self.cache, self.__own, self.heap = limit, {}, {}, []
    def __call__(self, record):
        '''
Says more than its margin.
        '''
        cache = self.cache
        cache[record['id']] = 1
        self.__own[record['id']] = 1
        heapq.heappush(self.heap, record['id'])
        return record['tokens'][:self.limit]
t = Cut(LIMIT)
USE
t({'id': 4, 'tokens': [1]})
""",
    "an attribute that it assigns on an object it makes": """
class Out: pass
class Cut:
    def __init__(self, limit): self.limit = limit
    def __call__(self, record):
        out = Out()
        out.limit = 3
        return record['tokens'][:self.limit], out
t = Cut(LIMIT)
USE
t({'tokens': [1]})
""",
    "an attribute that it assigns on itself by another name": """
class Cut:
    def __init__(self, limit): self.limit, self.count = limit, 0
    def __call__(self, record):
        this = same(self)
        this.count += 1
        return record['tokens'][:self.limit]
def same(this): return this
t = Cut(LIMIT)
USE
t({'tokens': [1]})
""",
    "an attribute that it assigns on the one object of its class": """
class Cut:
    one = None
    def __new__(cls, limit=LIMIT):
        if cls.one is None:
            cls.one = object.__new__(cls)
            cls.one.limit, cls.one.count = limit, 0
        return cls.one
    def __call__(self, record):
        this = Cut()
        this.count += 1
        return record['tokens'][:self.limit]
t = Cut()
USE
t({'tokens': [1]})
""",
}

#: Declarations of ``t`` that are the same.
ALIKE = {
    "lambdas on lines that differ elsewhere": (
        "t = [lambda r: sum(x for x in r), 50][0]",
        "# Another line.\nt = [lambda r: sum(x for x in r), 57][0]",
    ),
    "dicts of another order": (
        "names = {'a': [1], 'b': [2]}\ndef t(r): return names",
        "names = {'b': [2], 'a': [1]}\ndef t(r): return names",
    ),
    "what is under a mask": (
        "import numpy as np\na = np.ma.array([1, 2], mask=[0, 1])\ndef t(r): return a",
        "import numpy as np\na = np.ma.array([1, 3], mask=[0, 1])\ndef t(r): return a",
    ),
}
