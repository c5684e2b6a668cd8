"""Kernels: the leaves, attention over the rows of one device. They know masks and tokens, no meshes and no layouts."""

from collections.abc import Callable

from jaxcp.algebra import Attention
from jaxcp.kernels.blockwise import Blockwise
from jaxcp.kernels.reference import Reference
from jaxcp.mask import Mask

Make = Callable[[Mask], Attention]


def _triton(mask: Mask) -> Attention:
    from jaxcp.kernels.triton import Triton  # a heavy back end is imported when it is used

    return Triton(mask)


KERNELS: dict[str, Make] = {"reference": Reference, "blockwise": Blockwise, "triton": _triton}


def pick(implementation: str | Make | None, mask: Mask) -> Attention:
    """The kernel named `implementation`, one of the caller's own, or the best that can."""
    if callable(implementation):
        return implementation(mask)
    if implementation is None:
        implementation = "blockwise"
    if implementation not in KERNELS:
        raise ValueError(
            f"implementation={implementation!r} is not one of {', '.join(map(repr, KERNELS))}, None, or a function of "
            "a Mask that makes a kernel"
        )
    return KERNELS[implementation](mask)
