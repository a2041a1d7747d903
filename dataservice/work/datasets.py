"""The datasets of a worker's recent tasks."""

from __future__ import annotations

import gc
import logging
import threading
from collections import OrderedDict
from concurrent.futures import Future, wait

from dataservice.auto_shard import auto_shard
from dataservice.calls import RpcClient
from dataservice.config import ShardingPolicy
from dataservice.dataset.base import Node
from dataservice.proto import dataservice_pb2 as pb
from dataservice.wire import unpack_dataset
from mpidist.errors import CancelledError

logger = logging.getLogger(__name__)

# Datasets that are kept for the next iteration.
_DATASETS = 8
# How often a waiting thread looks whether its task is closed, in seconds.
_STOP_PERIOD_S = 0.1


class Datasets:
    """Fetches datasets, and gives all tasks of one the same object, which may have a ``cache()``.

    Args:
        where: The worker in words, for the log.
        patience_s: How long to try to reach the dispatcher, in seconds.
    """

    def __init__(self, where: str, patience_s: float) -> None:
        self._where = where
        self._patience_s = patience_s
        self._lock = threading.Lock()
        self._kept: OrderedDict[tuple[int, ...], Future[Node]] = OrderedDict()

    def get(self, lease: pb.Task, dispatcher: RpcClient) -> Node:
        """Return the dataset of a task.

        Args:
            lease: The task.
            dispatcher: Calls the dispatcher, until the task is closed.

        Raises:
            CancelledError: The task is closed.
            NotFoundError: The dispatcher does not know the dataset.
            UnavailableError: The dispatcher cannot be reached.
        """
        policy = ShardingPolicy(lease.policy)
        is_sharded = policy not in (ShardingPolicy.OFF, ShardingPolicy.DYNAMIC)
        key: tuple[int, ...] = (lease.dataset_id,)
        if is_sharded:
            key += lease.policy, lease.num_parts, lease.part
        while True:
            with self._lock:
                made = self._kept.get(key)
                if made is None:
                    mine = self._kept[key] = Future()
                    break
                self._kept.move_to_end(key)
            while not wait([made], _STOP_PERIOD_S).done:
                if dispatcher.stopped():
                    raise CancelledError("stopped while another task fetches the dataset")
            if made.exception() is None:
                return made.result()
            # The other task was closed, or has failed. This one tries it, for an error of its own.
        try:
            dataset = self._fetch(lease.dataset_id, dispatcher)
            if is_sharded:
                dataset = auto_shard(dataset, policy, lease.num_parts, lease.part)
            mine.set_result(dataset)
        except BaseException as error:
            with self._lock:
                self._kept.pop(key, None)
            mine.set_exception(error)
            raise
        self._evict()
        return dataset

    def _fetch(self, dataset_id: int, dispatcher: RpcClient) -> Node:
        request = pb.GetDatasetRequest(dataset_id=dataset_id)
        reply = dispatcher.fetch_with_retry("dispatcher/GetDataset", request, self._patience_s)
        return unpack_dataset(pb.Dataset.FromString(reply.body).pickle, reply.buffers)

    def _evict(self) -> None:
        with self._lock:
            done = [key for key, made in self._kept.items() if made.done()]
            evicted = done[: max(len(self._kept) - _DATASETS, 0)]
            for key in evicted:
                del self._kept[key]
        if evicted:
            logger.info(
                "%s keeps %d datasets and has dropped the dataset used longest ago; if another "
                "epoch of it comes, its cache() is filled again",
                self._where,
                _DATASETS,
            )
            # Functions that were pickled by value refer to themselves, and their objects may be
            # large, though it is few objects: by itself, garbage is collected late.
            gc.collect()
