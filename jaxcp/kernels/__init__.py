"""Kernels: the leaves, attention over the rows of one device. They know masks and tokens, no meshes and no layouts."""

from collections.abc import Callable

from jaxcp.algebra import Attention
from jaxcp.kernels.blockwise import Blockwise
from jaxcp.kernels.reference import Reference
from jaxcp.mask import Mask

KERNELS: dict[str, Callable[[Mask], Attention]] = {"reference": Reference, "blockwise": Blockwise}


def pick(implementation: str | None, mask: Mask) -> Attention:
    """The kernel named `implementation`, or the best that can."""
    if implementation is None:
        implementation = "blockwise"
    if implementation not in KERNELS:
        raise ValueError(f"implementation={implementation!r} is not one of {', '.join(map(repr, KERNELS))}, or None")
    return KERNELS[implementation](mask)
