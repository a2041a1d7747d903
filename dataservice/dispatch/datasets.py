"""The datasets that a dispatcher knows. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from dataservice.dispatch.records import Dataset, Iteration, Outcome, Part
from dataservice.proto import dataservice_pb2 as pb
from mpidist.errors import InvalidArgumentError, NotFoundError


class Datasets:
    """The part of the registry that has the datasets, and notes what changes.

    Args:
        ids: Where ids come from.
    """

    def __init__(self, ids: Iterator[int]) -> None:
        self.ids = ids
        self.datasets: dict[int, Dataset] = {}
        self._by_digest: dict[bytes, Dataset] = {}
        self._by_name: dict[str, Dataset] = {}
        self._outcome = Outcome()

    def dataset(self, dataset_id: int) -> Dataset:
        """Local. A dataset; NotFoundError if it is not known."""
        dataset = self.datasets.get(dataset_id)
        if dataset is None:
            raise NotFoundError(f"dataset {dataset_id} is not registered")
        return dataset

    def dataset_named(self, name: str) -> Dataset:
        """Local. A dataset; NotFoundError if it is not known."""
        dataset = self._by_name.get(name)
        if dataset is None:
            raise NotFoundError(f"no dataset {name!r} is registered at this dispatcher")
        return dataset

    def find_dataset(self, request: pb.RegisterDatasetRequest) -> Dataset | None:
        """Local. The dataset that a request is about, if it is known.

        Raises:
            InvalidArgumentError: Its name belongs to a dataset with other elements.
        """
        if not request.name:
            known = self._by_digest.get(request.digest)
            if known is not None and request.spec and not known.request.spec:
                known.request.spec = request.spec
                self._outcome.changed["dataset", known.id] = known
            if known is not None:
                known.last_used = float("inf")  # until the next look at the time
            return known
        dataset = self._by_name.get(request.name)
        if dataset is not None and dataset.request.spec != request.spec:
            raise InvalidArgumentError(
                f"the dataset {request.name!r} is registered with elements of another structure: "
                f"existing {dataset.request.summary}, new {request.summary}; datasets of the same "
                "ID must have the same structure"
            )
        return dataset

    def register_dataset(self, request: pb.RegisterDatasetRequest) -> Dataset:
        """Local. A dataset, new or known; raises as :meth:`find_dataset`."""
        dataset = self.find_dataset(request)
        if dataset is None:
            kept = pb.RegisterDatasetRequest()
            kept.CopyFrom(request)
            kept.ClearField("pickle")
            dataset = Dataset(next(self.ids), kept)
            self.restore_dataset(dataset)
            self._outcome.changed["dataset", dataset.id] = dataset
        return dataset

    def restore_dataset(self, dataset: Dataset) -> None:
        """Local. Add a dataset as it is."""
        self.datasets[dataset.id] = dataset
        self._by_name.setdefault(dataset.name, dataset)
        if not dataset.request.name:
            self._by_digest[dataset.request.digest] = dataset

    def expire_datasets(self, used: Collection[int], now: float, limit_s: float) -> None:
        """Local. Forget those without a name that have not been used for long.

        Args:
            used: Ids of those that are now.
            now: The time.
            limit_s: How long.
        """
        for dataset in list(self.datasets.values()):
            if dataset.id in used or dataset.last_used > now:
                dataset.last_used = now
            elif not dataset.request.name and now - dataset.last_used > limit_s:
                del self.datasets[dataset.id], self._by_digest[dataset.request.digest]
                del self._by_name[dataset.name]
                self._outcome.changed["dataset", dataset.id] = None

    def _touch(self, what: Part | Iteration) -> None:
        kind = "part" if isinstance(what, Part) else "iteration"
        self._outcome.changed[kind, what.id] = what
