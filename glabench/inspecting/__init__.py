"""The kernels as they are compiled, without a GPU: registers, spills, shared memory, occupancy, machine code."""
