"""What the forward and the backward kernels share: two warpgroups compute, a third loads (FlashAttention-3,
arXiv:2407.08608, section 3.1).

Logits are kept in base 2, the scale times log2(e): exp2 is what the hardware has.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxcp.mask import Mask, Tokens
from jaxcp.softmax import LOG2_E

ROWS = 64  # of logits that a warpgroup computes: the height of wgmma
TALL = 2 * ROWS  # rows of logits in a tile, those of both computing warpgroups
LOADER = 2  # the third warpgroup
# A thread's, of 65536 / 128 that three warpgroups share: what the loading one does not need the computing ones get.
COMPUTING_REGISTERS, LOADING_REGISTERS = 240, 24
TILE = plgpu.Layout.WGMMA  # how a tile lies in a warpgroup's registers


def call(body, name, grid, arguments, results, scratch, interpret):
    """Runs `body` with two computing warpgroups and a loading one over `grid`, {axis: size}."""
    return plgpu.kernel(
        body,
        out_type=results,
        scratch_types=scratch,
        grid=tuple(grid.values()),
        grid_names=tuple(grid),
        num_threads=3,
        thread_name="warpgroup",
        kernel_name=f"jaxcp_mosaic_gpu_{name}",
        # ex2, tanh and lg2 as the hardware has them; tanh errs by 2**-11, where bfloat16 rounds by 2**-9
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret or None,
    )(*arguments)


def smem(*shape, dtype, swizzle: int = 128):
    """Shared memory for matrices, which wgmma and TMA want in rows of `swizzle` bytes."""
    transforms = plgpu.TilingTransform((8, swizzle // jnp.dtype(dtype).itemsize)), plgpu.SwizzleTransform(swizzle)
    return plgpu.SMEM(shape, dtype, transforms=transforms)


def rows(tile, tall: int, warpgroup):
    """The rows of a computing warpgroup, of the whole and of its tile. In one of 64 rows both have all of them."""
    mine = warpgroup * ROWS if tall > ROWS else 0
    return pl.ds(tile * tall + mine, ROWS), pl.ds(mine, ROWS)


def load(ref, layout):
    """What lies in global memory or, numbers for each row or column, in shared memory."""
    where = ((),) if jax.__version_info__ < (0, 11) else ()
    return plgpu.load(ref, *where, layout=layout, optimized=False)


def transposed(ref):
    return plgpu.transpose_ref(ref, (1, 0)) if jax.__version_info__ < (0, 11) else ref.T


def one_for_each(row_dim: int):
    """The layout of numbers, one for each index of a tile's dim `row_dim`."""
    return TILE.reduce(1 - row_dim)


def spread(x, shape, dim: int):
    return lax.broadcast_in_dim(x, shape, [dim])


def cap(mask: Mask, products):
    """(capped, factor, slope): the logits in base 2 are capped * factor; slope is that of the cap, or None."""
    if mask.soft_cap is None:
        factor = mask.scale * LOG2_E
        # the forward multiplies the greatest product alone, which is not the greatest logit where the factor turns them
        return (products, factor, None) if factor > 0 else (products * factor, 1.0, None)
    ratio = jnp.tanh(products * (mask.scale / mask.soft_cap))
    return ratio, mask.soft_cap * LOG2_E, lambda: 1 - ratio * ratio


def hide(mask: Mask, x, fill: float, q: Tokens, kv: Tokens, q_dim: int):
    """A tile with `fill` where `mask.visible` is false. Its dim `q_dim` runs over the queries, whose tokens `q` are."""
    kv_dim = 1 - q_dim
    read = lambda ref, dim: load(ref, one_for_each(dim))
    keep = lambda see, x: jnp.where(see, x, fill)
    back, ahead = mask.reach
    if back is not None or ahead is not None:
        q_position, kv_position = read(q.position, q_dim), read(kv.position, kv_dim)
        if back is not None:
            x = keep(spread(q_position - back, x.shape, q_dim) <= spread(kv_position, x.shape, kv_dim), x)
        if ahead is not None:
            x = keep(spread(kv_position - ahead, x.shape, kv_dim) <= spread(q_position, x.shape, q_dim), x)
    if q.segment is not None and kv.segment is not None:
        q_segment, kv_segment = read(q.segment, q_dim), read(kv.segment, kv_dim)
        x = keep(spread(q_segment, x.shape, q_dim) == spread(kv_segment, x.shape, kv_dim), x)
    return x


def of_batch(tree, batch):
    """The rows of one of the batch, in arrays that may have one row for all."""
    return jax.tree.map(lambda ref: ref.at[batch if ref.shape[0] > 1 else 0], tree)


def cut(tokens: Tokens, rows) -> Tokens:
    return jax.tree.map(lambda ref: ref.at[rows], tokens)


class Pipe(NamedTuple):
    """Slots in shared memory that the loading warpgroup fills in turn and both computing ones empty."""

    smem: tuple[Any, ...]  # [stages, ...] each
    here: Any
    done: Any

    @classmethod
    def of(cls, stages: int, *smem) -> "Pipe":
        """The types of its parts."""
        here = plgpu.Barrier(num_barriers=stages, num_arrivals=len(smem))
        return cls(smem, here, plgpu.Barrier(num_barriers=stages, num_arrivals=LOADER))

    @property
    def stages(self) -> int:
        return self.smem[0].shape[0]

    def slot(self, n):
        return lax.rem(n, jnp.int32(self.stages))

    def fill(self, n, *sources):
        slot = self.slot(n)
        pl.when(n >= self.stages)(lambda: plgpu.barrier_wait(self.done.at[slot]))
        for source, target in zip(sources, self.smem, strict=True):
            plgpu.copy_gmem_to_smem(source, target.at[slot], self.here.at[slot])

    def wait(self, n):
        plgpu.barrier_wait(self.here.at[self.slot(n)])

    def at(self, n, which: int = 0):
        return self.smem[which].at[self.slot(n)]

    def free(self, n):
        plgpu.barrier_arrive(self.done.at[self.slot(n)])

    def drain(self, count):
        """Waits until the last of `count` fillings have been emptied, so that no barrier is left half used."""

        @pl.loop(jnp.maximum(count - self.stages, 0), count)
        def _(n):
            plgpu.barrier_wait(self.done.at[self.slot(n)])


def stream(count, visiting, *pipes: Pipe):
    """What the loading warpgroup does: fills each pipe with its share of visiting(m), for every m below `count`."""

    @pl.loop(0, count)
    def _(m):
        for pipe, sources in zip(pipes, visiting(m), strict=True):
            pipe.fill(m, *sources)

    for pipe in pipes:
        pipe.drain(count)


def add_product(acc, x, y_smem, interpret, meanwhile=lambda: None):
    """acc + x y in float32, x in registers; `meanwhile` runs while the tensor cores do. Pallas's interpreter has no
    such product."""
    if interpret:
        meanwhile()
        product = jnp.dot(x, y_smem[...], preferred_element_type=jnp.float32)
        plgpu.commit_smem()  # TMA may write where this, unlike wgmma, has read
        return acc + product

    def multiply(acc):
        plgpu.wgmma(acc, x, y_smem)
        meanwhile()

    return pl.run_state(multiply)(plgpu.ACC.init(acc))
