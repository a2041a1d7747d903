"""Ways from GPU to GPU past the memory of the host: NCCL, and CUDA IPC."""

from mpidist.cuda.ways.way import NotDirectError, Way

__all__ = ["NotDirectError", "Way"]
