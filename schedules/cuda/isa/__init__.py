"""The only door to PTX and CUDA intrinsics: one function an instruction, with what it means and where it exists.

Instructions without a word on it exist from sm_80 on, which is the least that these kernels are written for. Names are
those of CUTLASS where it has one. Source: the PTX ISA, 9.0, whose sections the modules name.

    memory        loads, stores, fences, prefetches, and policies of L2
    copies        copies to shared memory that a thread does not wait for: cp.async, and bulk copies
    mbarrier      barriers in shared memory, whose phases count arrivals and bytes
    blocks        those that share a cluster, and those that begin before the kernel before has ended
    threads       barriers of threads, shuffles, votes, special registers
    registers     how many a warpgroup has; values that the compiler must not look into
    tensor_core   mma, ldmatrix and their operands, also of 8-bit integers
    wgmma         warpgroup products
    functions     device functions in CUDA C, of which some of these are; scalar operators in few instructions"""
