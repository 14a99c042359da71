"""Compiled layers in JAX.

    import ecornn, ecornn.jax
    module = ecornn.compile("lstm", hidden=256, batch=16, training=True)
    layer = ecornn.jax.recurrent(module)
    y, (h, c) = layer(weights, x)  # under jax.jit, jax.grad and jax.vmap, too

The extra ``jax`` has what this needs.
"""

from ecornn.jax.recurrent import Recurrent, recurrent

__all__ = ["Recurrent", "recurrent"]
