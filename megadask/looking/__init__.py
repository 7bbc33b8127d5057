"""What is in sources, before a run.

look.py          `megadask.look`: reads some records as a run would
looks.py         what it found: tables, counts, samples
plots.py         the same as a figure
"""
