"""Context-parallel attention for JAX: see README.md, and `help(jaxcp.dot_product_attention)`."""

from jaxcp.attention import dot_product_attention as dot_product_attention
from jaxcp.layout import Contiguous as Contiguous
from jaxcp.layout import Striped as Striped
from jaxcp.layout import Zigzag as Zigzag
from jaxcp.layout import next_token_batch as next_token_batch
from jaxcp.modules import attention_fn as attention_fn
from jaxcp.rope import apply_rope as apply_rope
from jaxcp.strategies import AllGather as AllGather
from jaxcp.strategies import Ring as Ring
from jaxcp.strategies import Ulysses as Ulysses

__version__ = "0.1.0"
