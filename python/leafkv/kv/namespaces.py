"""Namespaces: what must be equal, besides the tokens, for KV to be shared.

A namespace is bytes that the KV manager compares and never interprets. :func:`namespace` makes them from named fields,
such that different fields never give equal bytes.
"""

from __future__ import annotations

from hashlib import sha256
from typing import TypeAlias

from leafkv.errors import InvalidInputError

Field: TypeAlias = str | bytes | int | float
"""The value of a field. Values of different types differ: 1, True, 1.0, "1" and b"1" are five."""


def namespace(
    model: str | bytes,
    *,
    revision: Field = "",
    adapter: Field = "",
    dtype: Field = "",
    weights_version: Field = 0,
    salt: str | bytes | None = None,
    **more: Field,
) -> bytes:
    """The namespace of KV that was computed in one way, for one tenant.

    Everything that changes the KV of given tokens belongs in it, for what is left out is shared: the model and its
    revision; the adapter (LoRA) with its version; the dtype of the KV and how it is quantised; RoPE settings other
    than the model's own. Images and sounds do not: they are the ``media`` of a prompt.

    New weights under the same name (an update in place, a step of training) need a new ``weights_version``. The old KV
    is then never found again; ``manager.clear(old_namespace)`` makes its blocks free at once.

    Tenants who share a namespace can tell by the time to first token what others have asked. A ``salt`` of their own,
    hard to guess and the same for all their requests, keeps their blocks apart. The namespace has the salt's SHA-256
    alone: it may be logged, sent in events and stored.

    Args:
        model: what names the model: a repository, a path, a digest of its files.
        revision: of the model.
        adapter: what is applied to the model's weights.
        dtype: of the KV.
        weights_version: counts updates of the weights under the same name.
        salt: the tenant's; None shares with all others who have none.
        more: further fields, by name. Given and not given differ, whatever the value.

    Returns:
        An encoding of all fields, equal in every process: the name, the type and the value of each, sorted by name,
        each with its length before it.

    Raises:
        InvalidInputError: an empty ``model`` or ``salt``, or a value of another type.
    """
    if not model:
        raise InvalidInputError(f"model: expected a name, got {model!r}")
    fields = {"model": model, "revision": revision, "adapter": adapter, "dtype": dtype, **more}
    fields["weights_version"] = weights_version
    encoded = [(name, *_encode(name, value)) for name, value in fields.items()]
    if salt is not None:
        encoded.append(("salt", "sha256", _hash_salt(salt)))
    parts = (part.encode() if isinstance(part, str) else part for field in sorted(encoded) for part in field)
    return b"leafkv namespace 1," + b"".join(b"%d:%b," % (len(part), part) for part in parts)


def _encode(name: str, value: Field) -> tuple[str, bytes]:
    """The type and the bytes of a value."""
    if isinstance(value, bytes):
        return "bytes", value
    if isinstance(value, str):
        # Lone surrogates come with file names that are no UTF-8.
        return "str", value.encode("utf-8", "surrogatepass")
    for kind in (bool, int, float):
        if isinstance(value, kind):
            return kind.__name__, repr(kind(value)).encode()
    raise InvalidInputError(f"{name}: expected a str, bytes, bool, int or float, got {value!r}")


def _hash_salt(salt: str | bytes) -> bytes:
    if not isinstance(salt, str | bytes):
        raise InvalidInputError(f"salt: expected a str, bytes or None, got a {type(salt).__name__}")
    if not salt:
        raise InvalidInputError(
            "salt: got an empty one, which isolates nobody: all who have no salt would share it. "
            "Expected the tenant's own, or None to share on purpose"
        )
    kind, value = _encode("salt", salt)
    return sha256(f"leafkv salt {kind} ".encode() + value).digest()
