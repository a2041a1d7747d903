"""States taken where an iteration ends, of consumers that go in step."""

import random
import threading
from itertools import islice

import pytest

from dataservice import Dataset, distribute

BATCHES = 45  # fifteen of each part


@pytest.mark.parametrize("consumers", [1, 2, 3])
def test_epoch_after_epoch_whenever_states_are_taken(make_service, consumers):
    target = make_service(2).target
    epochs = 12

    def elements(job, index, count):
        dataset = Dataset.range(1437).shuffle(500, seed=0).batch(32)
        apply = distribute(
            "distributed_epoch",
            target,
            job,
            index,
            count,
            deterministic=True,
            num_shards=3,
        )
        return iter(dataset.apply(apply).repeat())

    together = threading.Barrier(consumers)
    got, states = {}, []

    def read(index):
        draw = random.Random(index)
        with elements("training", index, consumers) as own:
            for epoch in range(epochs):
                for first in range(0, BATCHES, consumers):
                    if first + index < BATCHES:
                        got[epoch, first + index] = next(own).tolist()
                    together.wait()
                    last = first + consumers >= BATCHES
                    if index == 0 and (last or draw.random() < 0.1):
                        states.append(((epoch, first + consumers), own.get_state()))
                    together.wait()

    threads = [threading.Thread(target=read, args=(index,)) for index in range(consumers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    with elements("whole", 0, 1) as alone:
        expected = [batch.tolist() for batch in islice(alone, epochs * BATCHES)]
    assert [got.get(divmod(n, BATCHES)) for n in range(epochs * BATCHES)] == expected
    for number, ((epoch, used), state) in enumerate(random.Random(0).sample(states, 10)):
        begin = epoch * BATCHES + min(used, BATCHES)
        with elements(f"resumed {number}", 0, 1) as alone:
            alone.set_state(state)
            rest = [batch.tolist() for batch in islice(alone, 30)]
        assert rest[: len(expected) - begin] == expected[begin : begin + 30]
