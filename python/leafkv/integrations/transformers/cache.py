"""`LeafCache`: a cache of transformers over rows of a pool.

It counts in columns, as transformers does, and hands each layer's keys and values to the `ForwardStep` of the forward
that is under way. No layer ever forgets: a sliding window masks, so that any token can be cropped to, or shared.
"""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from leafkv.errors import InvalidInputError
from leafkv.integrations.transformers.forward import as_mask
from leafkv.integrations.transformers.pool import KVPool
from leafkv.integrations.transformers.rows import Rows

if TYPE_CHECKING:
    from typing_extensions import Self

_ZERO_IS_A_LENGTH = not hasattr(Cache, "activate_past_recording")
"""Whether this version of transformers crops to a length, or by one: to crop by 0 changes nothing."""


class LeafLayer(CacheLayerMixin):  # type: ignore[misc]
    """One layer of a `LeafCache`."""

    is_compileable = False
    is_croppable = True
    is_sliding = False

    def __init__(self, rows: Rows, index: int) -> None:
        super().__init__()
        self._rows, self._index = rows, index

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Take the new keys and values [B, num_kv_heads, q, head_dim].

        Returns them with a `LayerStep` at them, for the attention "leafkv"; for others those of all columns.
        """
        self._rows.check_open()
        step = self._rows.step
        if step is None:
            raise InvalidInputError("cache: expected a forward of the model of its pool, got one of another model")
        if step.in_place:
            key_states.leafkv_step = step
            return key_states, value_states
        step.write(self._index, key_states, value_states)
        return step.gather(self._index)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing: the memory is the pool's."""

    def get_seq_length(self) -> int:
        """Columns that are written, those of the forward that is under way included once this layer has them."""
        step = self._rows.step
        underway = 0 if step is None or self._index not in step.written else step.new.real.shape[1]
        return self._rows.columns + underway

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """All columns, from the first one on, in layers with a sliding window, too."""
        return self._rows.columns + int(query_length), 0

    def get_max_length(self) -> int:
        """No maximum but the pool's."""
        return -1

    get_max_cache_shape = get_max_length


class LeafCache(Cache):  # type: ignore[misc]
    """Keys and values of the rows of ``model.generate``, or of forwards, in blocks of a pool.

    Given the prompt, the cache begins with what the pool has of it: `generate` then computes the rest. In a batch that
    is the columns that all rows have, so that one new prompt makes all rows be computed. The cache is one conversation:
    it may be passed again, with all of the text or with what is new. `copy.deepcopy` makes one that goes on apart.

    Blocks are released by `close`, at the end of a ``with`` block, or when the cache goes; they stay findable.

    Args:
        source: a `KVPool`, or a model, for which the cache then makes a pool of its own.
        input_ids: the prompt that comes, int [B, tokens].
        attention_mask: its padding, [B, tokens], as `generate` gets it. Default: none is padding.

    Attributes:
        num_cached_tokens: tokens of the prompt that were found, in all rows together.

    Raises:
        InvalidInputError: an argument is malformed, or the model cannot be served (see `KVPool`).
    """

    def __init__(self, source: Any, input_ids: Tensor | None = None, attention_mask: Tensor | None = None) -> None:
        rows = Rows(source if isinstance(source, KVPool) else KVPool(source))
        rows.check_open()
        self._serve(rows)
        if input_ids is None:
            if attention_mask is not None:
                raise InvalidInputError("attention_mask: expected input_ids, too, got a mask alone")
            return
        if not isinstance(input_ids, torch.Tensor) or input_ids.ndim != 2 or input_ids.is_floating_point():
            raise InvalidInputError(f"input_ids: expected a tensor of ids [batch, tokens], got {input_ids!r}")
        tokens = input_ids.detach().cpu().numpy().astype(np.int64)
        shape = tokens.shape
        mask = torch.ones(shape) if attention_mask is None else attention_mask
        rows.begin_prompts(tokens, as_mask("attention_mask", mask, shape))

    def _serve(self, rows: Rows) -> None:
        super().__init__(layers=[LeafLayer(rows, index) for index in range(rows.pool.kv.num_layers)])
        self.rows = rows

    @property
    def pool(self) -> KVPool:
        """Where the blocks are."""
        return self.rows.pool

    @property
    def num_cached_tokens(self) -> int:
        """Tokens of the prompt that were found, in all rows together."""
        return self.rows.cached_tokens

    def close(self) -> None:
        """Release the blocks. They stay findable, until their memory is needed."""
        self.rows.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def __deepcopy__(self, memo: dict[int, Any]) -> LeafCache:
        twin = LeafCache.__new__(LeafCache)
        twin._serve(self.rows.fork())
        return twin

    def __repr__(self) -> str:
        return f"LeafCache({self.rows.count} rows of {self.rows.columns} columns, {self.pool!r})"

    # What transformers calls.

    def reset(self) -> None:
        """Forget the conversation."""
        self.rows.reset()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Row i goes on from row ``beam_idx[i]``: a fork, and not a copy."""
        self.rows.select(self._indices("beam_idx", beam_idx))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each row ``repeats`` times."""
        self.rows.repeat(repeats)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep rows, by their numbers or by a bool each."""
        self.rows.select(self._indices("indices", indices))

    def crop(self, tokens_to_remove: int) -> None:
        """Remove ``-tokens_to_remove`` columns; or, above 0, keep so many, as versions before 5.18 have it."""
        count = int(tokens_to_remove)
        to_length = count > 0 or (count == 0 and _ZERO_IS_A_LENGTH)
        self.rows.crop(count if to_length else self.rows.columns + count)

    def activate_past_recording(self) -> None:
        """Nothing: no layer forgets."""

    @property
    def batch_size(self) -> int:
        """Rows, or -1 before the first forward."""
        return self.rows.count or -1

    max_batch_size = batch_size

    @property
    def is_initialized(self) -> bool:
        """Whether there is anything."""
        return self.rows.columns > 0

    def _indices(self, name: str, indices: Any) -> list[int]:
        try:
            chosen = np.arange(self.rows.count)[np.asarray(torch.as_tensor(indices).cpu())]
        except IndexError as error:
            raise InvalidInputError(f"{name}: expected rows of {self.rows.count}, got {indices!r}") from error
        return [int(row) for row in np.atleast_1d(chosen)]
