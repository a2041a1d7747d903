"""Key-value stores with the names of torch.distributed, for threads, processes and ranks."""

from mpidist.store.local_stores import FileStore, HashStore
from mpidist.store.mpi_store import MPIStore
from mpidist.store.store import PrefixStore, Store

__all__ = ["FileStore", "HashStore", "MPIStore", "PrefixStore", "Store"]
