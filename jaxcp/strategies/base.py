"""What the strategies share."""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

from jaxcp.algebra import Attention


@dataclasses.dataclass(frozen=True, repr=False)
class Strategy:
    """Attention spread over mesh axis `axis` (a name, or a tuple of names taken as one axis).

    `inner` is the attention that each rank then runs: a strategy over other axes, or None for the kernel that
    `dot_product_attention` picks.
    """

    axis: str | tuple[str, ...]
    inner: Any = None  # a Strategy; bound, an Attention

    def __post_init__(self):
        kind = type(self).__name__
        if not self.own_axes or not all(isinstance(name, str) for name in self.own_axes):
            raise ValueError(f"{kind}(axis): a mesh axis name or a tuple of them, not {self.axis!r}")
        if self.inner is not None and (isinstance(self.inner, type) or not hasattr(self.inner, "place")):
            raise ValueError(f"{kind}({self.axis!r}, inner): another strategy or None, not {self.inner!r}")
        if len(set(self.axes)) < len(self.axes):
            raise ValueError(f"{self!r} uses a mesh axis twice; each strategy needs an axis of its own")

    def __repr__(self):
        """The call that made it: Ulysses('u', Ring('r'))."""
        inner = "" if self.inner is None else f", {self.inner!r}"
        return f"{type(self).__name__}({self.axis!r}{inner})"

    @property
    def own_axes(self) -> tuple[str, ...]:
        return self.axis if isinstance(self.axis, tuple) else (self.axis,)

    @property
    def axes(self) -> tuple[str, ...]:
        """The mesh axes of this strategy and all inside it, outermost first."""
        return self.own_axes + (self.inner.axes if isinstance(self.inner, Strategy) else ())

    def bind(self, kernel: Attention, sizes: Mapping[str, int], offsets: Callable, outermost: bool = True) -> Any:
        """This strategy with `kernel` at the bottom, and without the axes that have one device.

        `offsets(axis)` are those that a ring over `axis` must visit. `outermost`: nobody sums or merges what this
        attention returns.
        """
        alone = math.prod(sizes[name] for name in self.own_axes) == 1
        inner: Any = kernel
        if self.inner is not None:
            inner = self.inner.bind(kernel, sizes, offsets, outermost and (alone or self.only_moves))
        return inner if alone else dataclasses.replace(self, inner=inner, **self.settled(offsets, outermost))

    only_moves = False  # whether the inner attention's results are moved only, never summed

    def settled(self, offsets: Callable, outermost: bool) -> dict:
        """The fields that binding fills in."""
        return {}
