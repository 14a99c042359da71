"""Instructions of the hardware in words: tensor cores, warpgroup products, barriers in shared memory."""
