"""Layouts: how the tokens of a sequence are dealt to its shards, and back."""

import abc
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np


@dataclasses.dataclass(frozen=True, repr=False)
class Layout(abc.ABC):
    """The sequence is cut for `shards` shards. Each gets a few arithmetic runs of positions.

    A length that does not divide is padded at its end first; `indices` is the order of the padded sequence with the
    padding left out.
    """

    shards: int

    def __repr__(self):
        return f"{type(self).__name__}({self.shards})"

    def __post_init__(self):
        if not isinstance(self.shards, int | np.integer) or self.shards < 1:
            raise ValueError(f"{type(self).__name__}(shards): a positive number of shards, not {self.shards!r}")

    @property
    @abc.abstractmethod
    def multiple(self) -> int:
        """Padded lengths are multiples of this."""

    @abc.abstractmethod
    def runs(self, rank, length: int) -> list[tuple]:
        """The (start, step, count) of each run that shard `rank` holds of a padded `length`; `rank` may be traced."""

    def padded(self, length: int) -> int:
        return -(-length // self.multiple) * self.multiple

    def positions(self, rank, length: int):
        """int32 [length / shards]: the positions that shard `rank` (may be traced) holds of a padded `length`."""
        return jnp.concatenate(
            [start + step * jnp.arange(n, dtype=jnp.int32) for start, step, n in self.runs(rank, length)]
        )

    def indices(self, length: int) -> np.ndarray:
        """int32 [length]: the position of the token at each dealt place, for any length."""
        order = self._dealt(self.padded(length))
        return order[order < length]

    def deal(self, tree, axis: int = 1):
        """Puts the sequence dimension `axis` of every array (numpy or jax) of `tree` into dealt order."""
        return jax.tree.map(lambda x: _take(x, self.indices(_size(x, axis)), axis), tree)

    def undeal(self, tree, axis: int = 1):
        """The inverse of `deal`."""
        return jax.tree.map(lambda x: _take(x, np.argsort(self.indices(_size(x, axis))), axis), tree)

    def pad(self, x, axis: int = 1, fill=0):
        """Puts the padding rows (`fill`) where they lie among the dealt rows, so that every shard has as many."""
        length = x.shape[axis]
        if self.padded(length) == length:
            return x
        real = self._dealt(self.padded(length)) < length
        spread = _take(x, np.maximum(np.cumsum(real) - 1, 0), axis)
        return jnp.where(
            real.reshape([-1 if d == axis else 1 for d in range(x.ndim)]), spread, jnp.asarray(fill, x.dtype)
        )

    def unpad(self, x, length: int, axis: int = 1):
        """The inverse of `pad`."""
        if x.shape[axis] == length:
            return x
        return _take(x, np.flatnonzero(self._dealt(x.shape[axis]) < length), axis)

    def _dealt(self, length: int) -> np.ndarray:
        return _dealt(self, length)


@functools.lru_cache(maxsize=64)
def _dealt(layout: Layout, length: int) -> np.ndarray:
    runs = [run for rank in range(layout.shards) for run in layout.runs(rank, length)]
    return np.concatenate([start + step * np.arange(n, dtype=np.int32) for start, step, n in runs])


class Contiguous(Layout):
    """Shard r holds the r-th stretch. Causal attention is then uneven: the last shard works twice the mean."""

    @property
    def multiple(self) -> int:
        return self.shards

    def runs(self, rank, length):
        n = length // self.shards
        return [(rank * n, 1, n)]


class Zigzag(Layout):
    """Shard r holds stretches r and 2 shards - 1 - r of 2 shards: causal work is even (Llama 3, arXiv:2407.21783)."""

    @property
    def multiple(self) -> int:
        return 2 * self.shards

    def runs(self, rank, length):
        n = length // (2 * self.shards)
        return [(rank * n, 1, n), ((2 * self.shards - 1 - rank) * n, 1, n)]


class Striped(Layout):
    """Shard r holds every shards-th token from r on (Striped Attention, arXiv:2311.09431)."""

    @property
    def multiple(self) -> int:
        return self.shards

    def runs(self, rank, length):
        return [(rank, self.shards, length // self.shards)]


def next_token_batch(tokens, *, layout: Layout, segment_ids=None, pad_id: int | None = None) -> dict:
    """Inputs and labels for training on the next token, dealt by `layout`.

    Labels are shifted before dealing, where the next token is still the neighbour, and never across documents.

    Args:
      tokens: int [B, S], in the order of the text; numpy or jax.
      layout: how the sequence is dealt.
      segment_ids: int [B, S], the document of each token; negative is padding. None: one document a row.
      pad_id: tokens with this id are padding.

    Returns:
      A dict of [B, S] arrays in dealt order: `inputs`, `targets` (0 where there is none), `positions` (from 0 in each
      document), `segment_ids` (-1 in padding), and float32 `loss_weights` (0 where there is no target).
    """
    xp = jnp if isinstance(tokens, jax.Array) else np
    tokens = xp.asarray(tokens)
    if tokens.ndim != 2 or not np.issubdtype(tokens.dtype, np.integer):
        raise ValueError(f"next_token_batch: tokens must be integers [B, S], not {tokens.dtype} {list(tokens.shape)}")
    if not isinstance(layout, Layout):
        raise ValueError(f"next_token_batch: layout is Contiguous, Zigzag or Striped of some shards, not {layout!r}")
    segments = xp.zeros_like(tokens) if segment_ids is None else xp.asarray(segment_ids)
    if segments.shape != tokens.shape or not np.issubdtype(segments.dtype, np.integer):
        raise ValueError(
            f"next_token_batch: segment_ids must be integers of the shape of tokens, {list(tokens.shape)}, "
            f"not {segments.dtype} {list(segments.shape)}"
        )
    segments = segments.astype(xp.int32)
    if pad_id is not None:
        segments = xp.where(tokens == pad_id, -1, segments)
    place = xp.arange(tokens.shape[1], dtype=xp.int32)
    edge = segments[:, 1:] != segments[:, :-1]
    starts = xp.pad(edge, ((0, 0), (1, 0)), constant_values=True)
    positions = place - xp.maximum.accumulate(xp.where(starts, place, 0), axis=1)
    has_target = xp.pad(~edge & (segments[:, 1:] >= 0), ((0, 0), (0, 1)), constant_values=False)
    targets = xp.where(has_target, xp.roll(tokens, -1, axis=1), 0)
    return layout.deal(
        dict(
            inputs=tokens,
            targets=targets.astype(tokens.dtype),
            positions=positions.astype(xp.int32),
            segment_ids=xp.where(segments < 0, -1, segments).astype(xp.int32),
            loss_weights=has_target.astype(xp.float32),
        )
    )


def _size(x, axis: int) -> int:
    if not -x.ndim <= axis < x.ndim:
        raise ValueError(f"deal: an array of shape {list(x.shape)} has no dimension {axis}; pass axis= the sequence's")
    return x.shape[axis]


def _take(x, index: np.ndarray, axis: int):
    if not isinstance(x, jax.Array):
        return np.take(x, index, axis)
    place = (slice(None),) * (axis % x.ndim) + (index,)
    sharding = jax.typeof(x).sharding
    explicit = any(kind == jax.sharding.AxisType.Explicit for kind in sharding.mesh.axis_types)
    return x.at[place].get(out_sharding=sharding if explicit else None)
