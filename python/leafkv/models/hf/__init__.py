"""Hugging Face decoders as they are: their model code, LeafKV's cache and attention.

To import this package is to ask for the extra "torch", in a version that it works with.
"""

from leafkv._extras import require
from leafkv.models.hf.versions import transformers

require("torch", "torch")
transformers()
