"""From options to an engine: what :class:`leafkv.LLM` and :class:`leafkv.AsyncEngine` have in common.

:class:`EngineArgs` are the options, checked when they are made, before a model is read. :func:`build` loads the model,
sizes the KV memory and puts router and engine on top. The checks of options are here alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from leafkv import log
from leafkv._checks import check_bool, check_integer, check_number
from leafkv._core import instruction_set
from leafkv.engine.engine import Engine
from leafkv.engine.fingerprint import fingerprint
from leafkv.engine.journal import Journal
from leafkv.engine.logprobs import token_decoder
from leafkv.engine.router import Router
from leafkv.engine.speculation import proposer_of
from leafkv.engine.waiting import POLICIES, Policy
from leafkv.errors import InvalidInputError
from leafkv.kv import KVCache, KVManager, size_from_memory
from leafkv.kv.storage import DTYPES, storage_of
from leafkv.models.backend import LoadOptions

if TYPE_CHECKING:
    from leafkv.models.backend import Loaded
    from leafkv.models.tokenizer import Tokenizer

MAX_THREADS = 1024
"""As many as attention takes."""

_INTEGERS = {
    "block_size": None,
    "max_num_batched_tokens": None,
    "max_num_seqs": None,
    "num_blocks": None,
    "max_model_len": None,
    "num_threads": MAX_THREADS,
    "max_waiting": None,
}
"""Options that are at least 1, and what they are at most."""

_NEVER_NONE = ("block_size", "max_num_batched_tokens", "max_num_seqs")

_CHOICES = {"kv_cache_dtype": ("auto", *DTYPES), "scheduling_policy": POLICIES}


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineArgs:
    """The options of an engine, each as :class:`leafkv.LLM` describes it.

    Raises:
        InvalidInputError: an option is malformed.
    """

    num_blocks: int | None = None
    block_size: int = 16
    max_num_batched_tokens: int = 512
    max_num_seqs: int = 256
    max_model_len: int | None = None
    enable_prefix_caching: bool = True
    partial_hits: bool = True
    dtype: str = "auto"
    quantization: str | None = None
    kv_cache_dtype: str = "auto"
    num_threads: int | None = None
    scheduling_policy: Policy = "fcfs"
    max_waiting: int | None = None
    queue_timeout: float | None = None
    speculative_config: Mapping[str, Any] | None = None
    journal: str | Path | None = None
    backend: str = "auto"
    device: Any = "auto"
    tokenizer: Any = None

    def __post_init__(self) -> None:
        values: dict[str, object] = {}  # of numpy's numbers only the value is kept
        for name, most in _INTEGERS.items():
            value = getattr(self, name)
            if value is not None or name in _NEVER_NONE:
                values[name] = check_integer(name, value, 1, most)
        for name in ("enable_prefix_caching", "partial_hits"):
            check_bool(name, getattr(self, name))
        self.load_options  # noqa: B018 (to make them is to check them)
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                raise InvalidInputError(f"{name}: expected one of {', '.join(choices)}, got {getattr(self, name)!r}")
        if self.queue_timeout is not None:
            expected = "a number of seconds > 0"
            values["queue_timeout"] = check_number("queue_timeout", self.queue_timeout, expected, lambda x: x > 0)
        if self.speculative_config is not None:
            proposer_of(self.speculative_config)  # which checks it
            values["speculative_config"] = dict(self.speculative_config)
        if self.journal is not None and (not isinstance(self.journal, (str, Path)) or self.journal == ""):
            raise InvalidInputError(f"journal: expected a path, got {self.journal!r}")
        for name, value in values.items():
            object.__setattr__(self, name, value)

    @property
    def load_options(self) -> LoadOptions:
        """How the model is loaded."""
        return LoadOptions(self.dtype, self.quantization, self.backend, self.device, self.tokenizer)


@dataclass(frozen=True, slots=True)
class Built:
    """An engine, and what it was built of."""

    router: Router
    engine: Engine
    manager: KVManager
    cache: KVCache
    tokenizer: Tokenizer | None
    eos_token_ids: frozenset[int]
    journal: Journal | None
    identify: Callable[[], dict[str, str | int]]
    """What a journal of its requests belongs to; it takes a step of the model."""


def build(model: Any, args: EngineArgs) -> Built:
    """An engine for ``model``, which `leafkv.LLM` describes, ready to run.

    Raises:
        InvalidInputError: an option is not what ``model`` was loaded with, or more than it can.
        ModelLoadError: the model cannot be read, or not be quantized like that.
        InsufficientMemoryError: the KV cache does not fit in free memory.
    """
    log.show()
    loaded = _load(model, args.load_options)
    if summary := getattr(loaded, "weights", None):
        name, dtype = getattr(loaded, "name", "model"), getattr(loaded, "dtype", "float32")
        log.logger.info("%s: weights %s; arithmetic in %s", name, summary, dtype)
    config, block_size = loaded.config, args.block_size
    context = config.max_position_embeddings
    if args.max_model_len is not None and args.max_model_len > context:
        raise InvalidInputError(f"max_model_len: {args.max_model_len} is beyond the model's context of {context}")
    max_model_len = args.max_model_len or context
    kv_dtype = getattr(loaded, "kv_dtype", "float32") if args.kv_cache_dtype == "auto" else args.kv_cache_dtype
    place = getattr(loaded, "cache_options", {})
    shape = (config.num_layers, config.num_kv_heads, config.head_dim, block_size, kv_dtype)
    num_blocks = args.num_blocks
    if num_blocks is None:
        most = args.max_num_seqs * -(-max_model_len // block_size)
        available = storage_of(**place).available()
        size = size_from_memory(KVCache.nbytes_of_block(*shape), max_blocks=most, available=available)
        log.logger.info("KV cache: %s", size)
        num_blocks = size.num_blocks
    manager = KVManager(
        num_blocks,
        block_size,
        enable_prefix_caching=args.enable_prefix_caching,
        partial_hits=args.partial_hits,
    )
    cache = KVCache(num_blocks, *shape, **place)
    tokenizer = loaded.tokenizer
    eos_token_ids = frozenset(config.eos_token_ids).union(tokenizer.eos_token_ids if tokenizer else ())
    name = getattr(loaded, "name", "model")
    router = Router(
        tokenizer,
        vocab_size=config.vocab_size,
        max_model_len=max_model_len,
        num_blocks=num_blocks,
        block_size=block_size,
        max_num_seqs=args.max_num_seqs,
        eos_token_ids=eos_token_ids,
        has_priorities=args.scheduling_policy == "priority",
        model_name=name,
    )
    journal = None
    if args.journal is not None:
        journal = Journal(args.journal, identity_of(loaded, kv_dtype, args.num_threads))
    engine = Engine(
        loaded.model,
        manager,
        cache,
        eos_token_ids=eos_token_ids,
        max_num_batched_tokens=args.max_num_batched_tokens,
        max_num_seqs=args.max_num_seqs,
        max_model_len=min(max_model_len, num_blocks * block_size),
        num_threads=args.num_threads,
        policy=args.scheduling_policy,
        max_waiting=args.max_waiting,
        queue_timeout=args.queue_timeout,
        proposer=proposer_of(args.speculative_config),
        decode=None if tokenizer is None else token_decoder(tokenizer),
        journal=journal,
    )
    identify = partial(identity_of, loaded, kv_dtype, args.num_threads)
    return Built(router, engine, manager, cache, tokenizer, eos_token_ids, journal, identify)


def identity_of(loaded: Loaded, kv_cache_dtype: str, num_threads: int | None) -> dict[str, str | int]:
    """What a journal belongs to: requests go on to the same tokens where all of this is the same."""
    backend = getattr(loaded, "backend", "leafkv")
    return {
        **({} if backend == "leafkv" else {"backend": backend}),  # journals of before there was a choice lack it
        "model": getattr(loaded, "name", "model"),
        "dtype": getattr(loaded, "dtype", "float32"),
        "quantization": getattr(loaded, "quantization", None) or "none",
        "kv_cache_dtype": kv_cache_dtype,
        "vocab_size": loaded.config.vocab_size,
        "instruction_set": instruction_set(),
        "fingerprint": fingerprint(loaded.model, kv_cache_dtype, num_threads, getattr(loaded, "cache_options", None)),
    }


def _load(model: Any, options: LoadOptions) -> Loaded:
    if not all(hasattr(model, name) for name in ("model", "tokenizer", "config")):
        return options.load(model)
    # A model is what it was loaded as: what is asked for now must be that.
    loaded = {
        "backend": getattr(model, "backend", "leafkv"),
        "device": getattr(model, "cache_options", {}).get("device", "cpu"),
        "dtype": getattr(model, "dtype", "float32"),
    }
    for name, expected in loaded.items():
        asked = getattr(options, name)
        if str(asked) not in {"auto", expected}:
            raise InvalidInputError(f"{name}: expected auto or {expected}, as the model was loaded, got {asked!r}")
    quantization = getattr(model, "quantization", None)
    if options.quantization not in (None, quantization):
        raise InvalidInputError(
            f"quantization: expected {quantization!r}, as the model was loaded, got {options.quantization!r}"
        )
    if options.tokenizer is not None:
        raise InvalidInputError("tokenizer: expected None: the model was loaded with one")
    found: Loaded = model
    return found
