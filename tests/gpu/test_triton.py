"""What the Triton kernels become on GPUs, without one: nothing spills, and products are done by tensor cores."""

import jax
import jax.numpy as jnp
import pytest

from benchmarks import compiled
from jaxcp.algebra import Block
from jaxcp.kernels.triton import Triton
from jaxcp.mask import Mask, Tokens

pytestmark = [
    pytest.mark.skipif(compiled.available() is not None, reason=str(compiled.available())),
    pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning"),
]
SHARED_KIB = {"a100": 163, "h100": 227, "b200": 227}  # a block's, at most (CUDA C++ Programming Guide)
MASKS = {
    "causal": dict(causal=True),
    "all": dict(causal=True, window=(1000, 0), soft_cap=30.0),  # and segments
}


def kernels(target, head_dim, kind, dtype=jnp.bfloat16):
    """The kernels of forward and backward, GQA 2:1, onto running results."""
    b, t, n, kv_heads = 1, 4096, 8, 4
    shape = lambda *dims, dtype=jnp.float32: jax.ShapeDtypeStruct(dims, dtype)
    ids = shape(1, t, dtype=jnp.int32)
    tokens = Tokens(ids, ids if kind == "all" else None)
    q, kv = (shape(b, t, heads, head_dim, dtype=dtype) for heads in (n, kv_heads))
    out, row, dkv = shape(b, t, n, head_dim), shape(b, t, n), shape(b, t, kv_heads, head_dim)
    kernel = Triton(Mask(head_dim**-0.5, **MASKS[kind]))

    def both(block, lse, delta, out, dkv):
        return kernel.forward(block, (out, lse)), kernel.backward(block, lse, delta, out, (out, dkv, dkv))

    program = compiled.compile(both, Block(q, kv, kv, tokens, tokens), row, row, out, dkv, target=target)
    return compiled.resources(program, "jaxcp_triton")


@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_hopper(head_dim, kind):
    found = kernels("h100", head_dim, kind)
    assert sorted(kernel.name for kernel in found) == ["jaxcp_triton_dkv", "jaxcp_triton_dq", "jaxcp_triton_forward"]
    for kernel in found:
        assert kernel.spill_bytes == 0, kernel
        assert kernel.opcodes["HGMMA"] and not kernel.opcodes["HMMA"], kernel
        assert kernel.shared_bytes <= SHARED_KIB["h100"] * 1024, kernel


@pytest.mark.parametrize("target", ["a100", "b200"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_other_architectures(head_dim, target):
    for kernel in kernels(target, head_dim, "all"):
        assert kernel.shared_bytes <= SHARED_KIB[target] * 1024, kernel
        assert target == "b200" or kernel.opcodes["HMMA"], kernel
