from contextlib import suppress

with suppress(ImportError):
    import jax

    jax.config.update("jax_disable_most_optimizations", True)  # programs run once, and compiling takes longest
