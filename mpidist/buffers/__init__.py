"""Arrays of any framework as memory for MPI, reductions, and large copies."""
