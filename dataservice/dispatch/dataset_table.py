"""The datasets that a dispatcher knows. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from dataservice.dispatch.records import Dataset, Outcome
from dataservice.proto import dataservice_pb2 as pb
from mpidist.errors import InvalidArgumentError, NotFoundError


class DatasetTable:
    """The registered datasets, found by id, by name, and without a name by digest.

    The digest is the hash of the pickle. Datasets of equal identity may differ in globals that
    their functions use and in objects, so a dataset is not recognized by its identity: it is sent
    and kept again if its pickle differs.

    Args:
        ids: Source of new ids.
        outcome: Takes the changes.

    Attributes:
        by_id: All datasets, by id.
    """

    def __init__(self, ids: Iterator[int], outcome: Outcome) -> None:
        self._ids = ids
        self._outcome = outcome
        self.by_id: dict[int, Dataset] = {}
        self._by_digest: dict[bytes, Dataset] = {}
        self._by_name: dict[str, Dataset] = {}

    def get(self, dataset_id: int) -> Dataset:
        """Return a dataset; NotFoundError if it is not known."""
        dataset = self.by_id.get(dataset_id)
        if dataset is None:
            raise NotFoundError(f"dataset {dataset_id} is not registered")
        return dataset

    def named(self, name: str) -> Dataset:
        """Return the dataset of a name; NotFoundError if it is not known."""
        dataset = self._by_name.get(name)
        if dataset is None:
            raise NotFoundError(f"no dataset {name!r} is registered at this dispatcher")
        return dataset

    def find(self, request: pb.RegisterDatasetRequest) -> Dataset | None:
        """Return the dataset of a request, if it is known.

        Raises:
            InvalidArgumentError: Its name belongs to a dataset with other elements.
        """
        if not request.name:
            known = self._by_digest.get(request.digest)
            if known is not None and request.spec and not known.request.spec:
                known.request.spec = request.spec
                self._outcome.touch(known)
            if known is not None:
                known.last_used = float("inf")  # until the next check of unused datasets
            return known
        dataset = self._by_name.get(request.name)
        if dataset is not None and dataset.request.spec != request.spec:
            raise InvalidArgumentError(
                f"the dataset {request.name!r} is registered with elements of another structure: "
                f"existing {dataset.request.summary}, new {request.summary}; datasets of the same "
                "ID must have the same structure"
            )
        return dataset

    def register(self, request: pb.RegisterDatasetRequest) -> Dataset:
        """Return the dataset of a request, new or known; raises as :meth:`find`."""
        dataset = self.find(request)
        if dataset is None:
            kept = pb.RegisterDatasetRequest()
            kept.CopyFrom(request)
            kept.ClearField("pickle")
            dataset = Dataset(next(self._ids), kept)
            self.restore(dataset)
            self._outcome.touch(dataset)
        return dataset

    def restore(self, dataset: Dataset) -> None:
        """Add a dataset that is in the journal."""
        self.by_id[dataset.id] = dataset
        self._by_name.setdefault(dataset.name, dataset)
        if not dataset.request.name:
            self._by_digest[dataset.request.digest] = dataset

    def expire(self, used: Collection[int], now: float, limit_s: float) -> None:
        """Forget datasets without a name that no job has used for some time.

        Args:
            used: Ids of the datasets that jobs use now.
            now: The time.
            limit_s: Seconds without use.
        """
        for dataset in list(self.by_id.values()):
            if dataset.id in used or dataset.last_used > now:
                dataset.last_used = now
            elif not dataset.request.name and now - dataset.last_used > limit_s:
                del self.by_id[dataset.id], self._by_digest[dataset.request.digest]
                del self._by_name[dataset.name]
                self._outcome.remove(dataset)
