"""`LeafCache`: a cache for models of Hugging Face transformers, whose keys and values live in LeafKV blocks.

    pool = KVPool(model, num_blocks=1024)
    with LeafCache(pool, ids) as cache:  # what of the prompt is in the pool is held, and not computed again
        model.generate(ids, cache=cache)  # past_key_values= in transformers before 5.24

To import this package makes ``attn_implementation="leafkv"`` known to transformers: a model that has it reads the
blocks in place. With any other attention, keys and values are gathered for each layer: right with every model, but a
copy.
"""

from leafkv.integrations.transformers.cache import LeafCache
from leafkv.integrations.transformers.pool import KVPool
from leafkv.models.hf.attention import register

register()

__all__ = ["KVPool", "LeafCache"]
