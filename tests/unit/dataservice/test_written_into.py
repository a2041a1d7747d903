"""Consumers that write into what they have got: no pass and no other consumer sees that."""

import numpy as np
import pytest

from dataservice import Dataset, distribute

COUNT = 1 << 13  # 64 KiB: large enough to travel beside the pickle


def zeros(i):
    return {"small": np.zeros(3), "large": np.zeros(COUNT)}


def write(element):
    for array in element.values():
        with pytest.raises(ValueError, match="read-only"):
            array += 1
    return sum(float(array[0]) for array in element.values())


def test_what_is_kept_in_memory_cannot_be_written_into():
    made = []

    def make(i):
        made.append(np.zeros(3))
        return made[-1], None, "text"

    cached = Dataset.range(2).map(make).cache()
    for _ in range(2):
        for array, nothing, text in cached:
            assert (nothing, text) == (None, "text")
            with pytest.raises(ValueError, match="read-only"):
                array += 1
    made[0] += 1  # it is the function's own


@pytest.mark.parametrize("distributed", [False, True])
def test_what_contains_the_arrays_is_of_each_pass_its_own(make_service, distributed):
    def change(element):
        element["x"] = element["x"] / 255
        element["pair"][1].pop("label")
        return element

    def make(i):
        return {"x": np.full(3, 255.0), "pair": (int(i), {"label": i})}

    dataset = Dataset.range(3).map(make).cache().map(change)
    if distributed:
        dataset = dataset.apply(distribute("distributed_epoch", make_service(1).target))
    for _ in range(3):
        for element in dataset:
            np.testing.assert_array_equal(element["x"], 1)
            assert element["pair"][1] == {}


def test_nor_where_workers_keep_it(make_service):
    service = make_service(2)
    dataset = Dataset.range(10).map(zeros).cache()
    dataset = dataset.apply(distribute("distributed_epoch", service.target))
    for _ in range(2):
        assert [write(element) for element in dataset] == [0.0] * 10


def test_what_a_worker_in_this_process_keeps_is_not_what_consumers_write_into(make_service):
    service = make_service(1)
    shared = np.zeros(COUNT)
    dataset = Dataset.range(5).map(lambda i: shared[:])
    for element in dataset.apply(distribute("parallel_epochs", service.target)):
        element += 1
        np.testing.assert_array_equal(element, 1)
    np.testing.assert_array_equal(shared, 0)
