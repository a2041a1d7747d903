"""A store that one rank holds, for all ranks."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Sequence
from datetime import timedelta
from operator import index
from typing import Any

from mpidist.errors import DeadlineExceededError, DistStoreError, InvalidArgumentError, OpError
from mpidist.rpc import open_endpoint
from mpidist.runtime import world
from mpidist.store.base import DEFAULT_TIMEOUT, Store
from mpidist.store.holder import SERVICE, address_of, pack, read_answer, shared
from mpidist.work import Work

_IDS = itertools.count(1)

# What a holder that is alive needs at most to answer beyond the time that is spent waiting.
_ANSWER_S = 10.0


class MPIStore(Store):
    """A store in the memory of one rank, that all ranks reach by messages.

    Each rank makes it by itself, when it likes; the holder's thread serves the others. All
    MPIStores of one holder are views of one store, so that parts of a program should take a
    PrefixStore each. It lasts until the holder has closed all its own: calls fail then. To
    begin a new one afterwards the holder must have made it before others call. If MPI has not been
    started yet, making one starts it, which is collective.

    Args:
        timeout: How long calls wait for a key, in seconds or as a timedelta.
        rank: Of the holder; the same on all ranks.

    Raises:
        ValueError: There is no such rank, or the limit is negative.
    """

    def __init__(self, timeout: float | timedelta = DEFAULT_TIMEOUT, rank: int = 0) -> None:
        super().__init__(timeout)
        here = world()
        self._holder = index(rank)
        if not 0 <= self._holder < here.size:
            raise ValueError(f"rank {rank} cannot hold a store: ranks are 0 to {here.size - 1}")
        self._is_holder = self._holder == here.rank
        self._closed = False
        self._address = address_of(here, self._holder)
        self._endpoint = open_endpoint("mpi")
        if self._is_holder:
            shared.join()

    @property
    def rank(self) -> int:
        """Rank of the holder."""
        return self._holder

    def clone(self) -> MPIStore:
        """Local. Another store with the same entries and a time limit of its own; close it too.

        Raises:
            DistStoreError: This one is closed.
        """
        self._check_open()
        return MPIStore(self._timeout, self._holder)

    def close(self) -> None:
        """Local. Use the store no more; the holder's last one takes the entries with it.

        Calls of other ranks, also those that wait, then fail with DistStoreError; idempotent.
        """
        if self._closed:
            return
        self._closed = True
        self._endpoint.close()
        if self._is_holder:
            shared.leave()

    def __enter__(self) -> MPIStore:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"MPIStore(rank={self._holder})"

    # Inside

    def _check_open(self) -> None:
        if self._closed:
            raise DistStoreError(f"{self._here()} is closed")

    def _carry_out(
        self, operation: str, keys: Sequence[str], values: Sequence[bytes], limit_s: float
    ) -> list[bytes] | None:
        self._check_open()
        lengths, buffers = pack(values)
        identity, longest_s = next(_IDS), limit_s + _ANSWER_S
        header = {
            "operation": operation,
            "keys": list(keys),
            "lengths": lengths,
            "id": identity,
            "limit_s": longest_s,
        }
        try:
            work = self._ask("Do", header, longest_s, buffers)
            try:
                work.block(time.monotonic() + limit_s)
            finally:
                if not work.is_completed():
                    # The holder says whether it had a value to give: none is lost on the way.
                    self._ask("GiveUp", {"id": identity}, _ANSWER_S)
            return read_answer(work.result())
        except InvalidArgumentError:
            raise
        except DeadlineExceededError as error:
            raise DistStoreError(
                f"{self._here()}: no answer to {operation} from rank {self._holder} within "
                f"{longest_s:g} s; it must make its MPIStore too, and be alive"
            ) from error
        except OpError as error:
            raise DistStoreError(
                f"{self._here()}: {operation} failed ({error}); the store lasts until rank "
                f"{self._holder} closes it, or ends: have all ranks finish before"
            ) from error

    def _ask(
        self, method: str, header: dict[str, Any], limit_s: float, buffers: Sequence[Any] = ()
    ) -> Work:
        body = json.dumps(header, ensure_ascii=False).encode()
        return self._endpoint.call(
            self._address, f"{SERVICE}/{method}", body, buffers, timeout=limit_s
        )
