"""Data tasks on the endpoints of a server, as mpidist.Server makes them."""

import threading

import pytest

from dataservice import Dataset, distribute
from dataservice.server import DataTask
from mpidist import open_endpoint


class FakeServer:
    """Two tasks of the job ``data``, each with an endpoint of its own."""

    def __init__(self, index, endpoints):
        self._index = index
        self._endpoints = endpoints
        self.endpoint = endpoints[index]

    def own_index(self, job):
        assert job == "data"
        return self._index

    def task_address(self, job, index):
        assert job == "data"
        return str(self._endpoints[index].address)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_tasks_form_a_service(order):
    endpoints = [open_endpoint("inproc", number) for number in (4901, 4902)]
    tasks = []
    for index in order:
        tasks.append(DataTask(FakeServer(index, endpoints)))
        endpoints[index].serve_in_thread()
    for task in tasks:
        task._worker.registration.wait(10)
    dataset = Dataset.range(100).apply(distribute("parallel_epochs", "inproc://localhost:4901"))
    assert sorted(dataset) == sorted(2 * list(range(100)))
    for task in tasks:
        task.close()
    for endpoint in endpoints:
        endpoint.close()
    for task in tasks:
        task.close()
    assert not [t for t in threading.enumerate() if t.name.startswith("dataservice-worker")]


def test_closing_does_not_wait_for_a_server_that_serves_no_more():
    with open_endpoint("inproc", 4903) as endpoint:
        task = DataTask(FakeServer(0, [endpoint]))
        closing = threading.Thread(target=task.close)
        closing.start()
        closing.join(3)
        assert not closing.is_alive()
