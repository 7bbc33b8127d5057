import time
import megadask as md
from tests.megadask.helpers.data import corpus, pipeline
from tests.megadask.helpers.ranks import run
from tests.megadask.helpers.seen import drain, spans_by_step, tokens_delivered, every_token, shape

DATA = corpus({"a": 60, "b": 40, "c": 20}, longest=300)

def test_x(client, name):
    for i in range(3):
        t=time.time()
        with md.serve(pipeline(DATA), client, name=name) as service:
            print("serve", time.time()-t)
            t=time.time()
            ranks = run(service, drain)
            print("run", time.time()-t, [len(r) for r in ranks])
            assert shape(ranks[0]) == shape(ranks[1])
            assert tokens_delivered(ranks) == every_token([r for v in DATA.values() for r in v])
            t=time.time()
            print(service.audit()["total"]); t=time.time()
        print("close", time.time()-t)

def test_y(local_client, name):
    test_x(local_client, name)
