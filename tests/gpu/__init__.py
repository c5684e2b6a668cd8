"""What the tests of kernels that are compiled for GPUs share."""

import jax
import jax.numpy as jnp
import pytest

from benchmarks import compiled
from jaxcp.algebra import Block
from jaxcp.mask import Tokens

needs_compiler = pytest.mark.skipif(compiled.available() is not None, reason=str(compiled.available()))
triton_is_deprecated = pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning")
# A block's at most: CUDA C++ Programming Guide, "Technical Specifications per Compute Capability"
SHARED_KIB = {"a100": 163, "h100": 227, "b200": 227}


def forward_and_backward(kernel, target, head_dim, *, packed, onto, dtype=jnp.bfloat16) -> list[compiled.Kernel]:
    """What `kernel`, which says jaxcp in its kernels' names, becomes on `target`. GQA 2:1, 4096 tokens."""
    b, t, n, kv_heads = 2, 4096, 8, 4
    shape = lambda *dims, dtype=jnp.float32: jax.ShapeDtypeStruct(dims, dtype)
    ids = shape(1, t, dtype=jnp.int32)
    tokens = Tokens(ids, ids if packed else None)
    q, kv = (shape(b, t, heads, head_dim, dtype=dtype) for heads in (n, kv_heads))
    out, row, dkv = shape(b, t, n, head_dim), shape(b, t, n), shape(b, t, kv_heads, head_dim)

    def both(block, lse, delta, out, dkv):
        so_far = ((out, lse), (out, dkv, dkv)) if onto else (None, None)
        block = kernel.place(block)
        return kernel.forward(block, so_far[0]), kernel.backward(block, lse, delta, out, so_far[1])

    program = compiled.compile(both, Block(q, kv, kv, tokens, tokens), row, row, out, dkv, target=target)
    found = compiled.resources(program, "jaxcp")
    assert all(kernel.shared_bytes <= SHARED_KIB[target] * 1024 for kernel in found), found
    return found
