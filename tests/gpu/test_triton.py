"""What the Triton kernels become on GPUs, without one: nothing spills, and products are done by tensor cores."""

import pytest

from jaxcp.kernels.triton import Triton
from jaxcp.mask import Mask
from tests.gpu import forward_and_backward, needs_compiler, triton_is_deprecated

pytestmark = [needs_compiler, triton_is_deprecated]
MASKS = {
    "causal": dict(causal=True),
    "all": dict(causal=True, window=(1000, 0), soft_cap=30.0),  # and segments
}


def kernels(target, head_dim, kind):
    return forward_and_backward(
        Triton(Mask(head_dim**-0.5, **MASKS[kind])), target, head_dim, packed=kind == "all", onto=True
    )


@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_hopper(head_dim, kind):
    found = kernels("h100", head_dim, kind)
    assert sorted(kernel.name for kernel in found) == ["jaxcp_triton_dkv", "jaxcp_triton_dq", "jaxcp_triton_forward"]
    for kernel in found:
        assert kernel.spill_bytes == 0, kernel
        assert kernel.opcodes["HGMMA"] and not kernel.opcodes["HMMA"], kernel


@pytest.mark.parametrize("target", ["a100", "b200"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_other_architectures(head_dim, target):
    for kernel in kernels(target, head_dim, "all"):
        assert target == "b200" or kernel.opcodes["HMMA"], kernel
