import os
from contextlib import suppress

with suppress(ImportError):
    import jax

    # Programs run once, and compiling takes longest.
    jax.config.update("jax_disable_most_optimizations", True)
    if jax.__version_info__[:2] == (0, 10):  # others may not know the flag, and would abort
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_cpu_use_fusion_emitters=false"
