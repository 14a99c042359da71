"""A cell's scalars in kernels: expressions, the threads that own them, statistics of batch rows."""
