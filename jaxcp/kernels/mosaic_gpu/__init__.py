"""FlashAttention-3 (arXiv:2407.08608) in Pallas Mosaic GPU, for Hopper: TMA, wgmma, and warpgroups of two kinds.

Compiled for another architecture these kernels end the process (LLVM: "Cannot select"), without an exception: who
picks them must know the device.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp

from jaxcp import blocks
from jaxcp.algebra import Block
from jaxcp.blocks import whole
from jaxcp.kernels.mosaic_gpu import backward, forward
from jaxcp.kernels.mosaic_gpu.common import TALL
from jaxcp.mask import Mask
from jaxcp.softmax import LOG2_E


@dataclasses.dataclass(frozen=True)
class MosaicGPU:
    """For 16 bits, and heads of 64, 128 or 256, those of keys and of values alike."""

    mask: Mask
    interpret: Any = False  # or plgpu.InterpretGPUParams, of jax 0.11: by Pallas's interpreter, on any device

    def place(self, block: Block) -> Block:
        dtype, sizes = block.q.dtype, {block.q.shape[3], block.v.shape[3]}
        if dtype not in (jnp.bfloat16, jnp.float16) or len(sizes) > 1 or not sizes <= forward.CONFIGS.keys():
            raise ValueError(
                f'implementation="mosaic_gpu": {dtype} with heads of {block.q.shape[3]} (query, key) and '
                f"{block.v.shape[3]} (value); it takes bfloat16 or float16 with both of them "
                f"{', '.join(map(str, forward.CONFIGS))}: cast or pad, or use another implementation"
            )
        return block

    def forward(self, block: Block, onto=None):
        config = forward.CONFIGS[block.q.shape[3]]
        q, k, v = whole(block.q, TALL), whole(block.k, config.keys), whole(block.v, config.keys)
        *tokens, kinds = blocks.survey(self.mask, block.q_tokens, block.kv_tokens, TALL, config.keys)
        onto = None if onto is None else (whole(onto[0], TALL), _by_head(onto[1], TALL))
        arguments = q, k, v, *tokens, blocks.visits(kinds), onto
        out, lse = forward.forward(self.mask, config, self.interpret, arguments)
        t = block.q.shape[1]
        return out[:, :t], lse[..., :t].swapaxes(1, 2)

    def backward(self, block: Block, lse, delta, dout, onto=None):
        (_, t, _, h), s = block.q.shape, block.k.shape[1]
        dout = dout.astype(block.q.dtype)

        def arguments(block_q: int, block_k: int):
            q, k, v, do = (
                whole(block.q, block_q),
                whole(block.k, block_k),
                whole(block.v, block_k),
                whole(dout, block_q),
            )
            *tokens, kinds = blocks.survey(self.mask, block.q_tokens, block.kv_tokens, block_q, block_k)
            return (q, k, v, do, _by_head(lse * LOG2_E, block_q), _by_head(delta, block_q), *tokens), kinds

        config = backward.DQ[h]
        args, kinds = arguments(config.tall, config.wide)
        running = None if onto is None else whole(onto[0], config.tall)
        dq = backward.dq(self.mask, config, self.interpret, (*args, blocks.visits(kinds), running))

        config = backward.DKV[h]
        args, kinds = arguments(config.wide, config.tall)
        running = None if onto is None else tuple(whole(x, config.tall) for x in onto[1:])
        visits = blocks.visits(kinds.swapaxes(1, 2))
        dk, dv = backward.dkv(self.mask, config, self.interpret, (*args, visits, running))
        return dq[:, :t], dk[:, :s], dv[:, :s]


def _by_head(x, tile: int):
    """[b, t, n], a number for each query, as [b, n, t] of whole tiles."""
    return whole(x, tile).swapaxes(1, 2)
