"""Strategies: each takes an attention and gives one, spread over one more mesh axis.

They know axes and rows, no masks and no kernels, and compose: the 2-D hybrid is `Ulysses("u", Ring("r"))`.
"""

from jaxcp.strategies.all_gather import AllGather
from jaxcp.strategies.base import Strategy
from jaxcp.strategies.ring import Ring
from jaxcp.strategies.ulysses import Ulysses

__all__ = ["AllGather", "Ring", "Strategy", "Ulysses"]
