"""What the cuDNN kernel becomes on GPUs, without one: the same custom calls as those of jax's own function."""

import json
import re
from functools import partial

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import jaxcp
from benchmarks import compiled
from jaxcp import AllGather, Ring, Zigzag
from jaxcp.kernels.cudnn import CAUSAL, FULL, KINDS, Cudnn, CustomCalls
from tests.gpu import needs_compiler

pytestmark = needs_compiler
B, T, H, DEVICES = 2, 4096, 128, 4
SCALE = 0.125
CHECK = "jax._src.cudnn.fused_attention_stablehlo.check_cudnn_version"  # asks for the library, which is not here
on_devices = partial(compiled.compile, devices=DEVICES, spec=P(None, "context"))


def arrays(heads, kv_heads, dtype=jnp.bfloat16):
    q, kv = (jax.ShapeDtypeStruct((B, T, n, H), dtype) for n in (heads, kv_heads))
    return q, kv, kv, q


def custom_calls(program) -> list[dict]:
    """cuDNN's calls in a program's HLO: what they take and give, and their configuration."""
    lines = [line for line in program.as_text().splitlines() if "__cudnn$fmha" in line]
    return [
        {
            "target": re.search(r'custom_call_target="(.*?)"', line)[1],
            "results": re.search(r"= (\(.*?\)) custom-call\(", line)[1],
            "operands": re.search(r"operand_layout_constraints=\{(.*?\})\}", line)[1],
            "api": re.search(r"api_version=(\w+)", line)[1],
            "config": without_defaults(json.loads(re.search(r"backend_config=(\{.*\})", line)[1])),
        }
        for line in lines
    ]


def without_defaults(config):
    """A message of protobuf as it reads where fields at their defaults are left out."""
    if not isinstance(config, dict):
        return config
    fields = {name: without_defaults(x) for name, x in config.items()}
    return {name: x for name, x in fields.items() if x not in ([], "0", 0, False, "PRIMITIVE_TYPE_INVALID")}


@pytest.mark.parametrize("kv_heads", [8, 2], ids=["MHA", "GQA"])
@pytest.mark.parametrize("kind", [CAUSAL, FULL], ids=["causal", "full"])
def test_the_calls_are_those_of_jax(kind, kv_heads, monkeypatch):
    monkeypatch.setattr(CHECK, lambda: 91300)

    def ours(q, k, v, dout):
        out, lse = CustomCalls.forward(q, k, v, SCALE, kind)
        return out, CustomCalls.backward(q, k, v, lse, dout, out, SCALE, kind)

    def theirs(q, k, v, dout):
        attention = partial(jax.nn.dot_product_attention, scale=SCALE, is_causal=kind == CAUSAL, implementation="cudnn")
        out, pull = jax.vjp(attention, q, k, v)
        return out, pull(dout)

    shapes = arrays(8, kv_heads)
    found = custom_calls(on_devices(ours, *shapes, target="h100"))
    assert [call["target"] for call in found] == ["__cudnn$fmhaSoftmax", "__cudnn$fmhaSoftmaxBackward"]
    assert found[0]["results"] == "(bf16[2,8,1024,128]{3,1,2,0}, f32[2,8,1024]{2,1,0}, u8[0]{0})"
    assert found == custom_calls(on_devices(theirs, *shapes, target="h100", check_vma=False))


def under(strategy, chunks, causal, target, dtype=jnp.bfloat16):
    """The custom calls, as (direction, queries, keys, mask), of a zigzag attention on paper devices."""

    def both(q, k, v, dout):
        attention = partial(
            jaxcp.dot_product_attention,
            strategy=strategy,
            layout=Zigzag(DEVICES),
            is_causal=causal,
            implementation=partial(Cudnn, chunks=chunks),
        )
        out, pull = jax.vjp(attention, q, k, v)
        return out, pull(dout)

    found = set()
    for call in custom_calls(on_devices(both, *arrays(8, 2, dtype), target=target)):
        config = call["config"]["cudnn_fmha_backend_config"]
        assert call["operands"].startswith({jnp.bfloat16: "bf16", jnp.float16: "f16"}[dtype])
        rows, columns = map(int, config["intermediate_tensor_shape"]["dimensions"][2:])
        found.add(("backward" if "Backward" in call["target"] else "forward", rows, columns, config["mask_type"]))
    return found


LOCAL, RUN = T // DEVICES, T // DEVICES // 2


def both_ways(*calls):
    return {(way, *call) for way in ("forward", "backward") for call in calls}


@pytest.mark.parametrize("target", ["h100", "a100"])
def test_ring(target):
    full = [(rows, columns, "NO_MASK") for rows in (LOCAL, RUN) for columns in (LOCAL, RUN)]
    assert under(Ring("context"), (2, 2), True, target) == both_ways((LOCAL, LOCAL, "CAUSAL"), *full)


def test_all_gather():
    own, before = (RUN, RUN, KINDS[CAUSAL]), [(RUN, RUN * n, KINDS[FULL]) for n in range(1, 2 * DEVICES + 1)]
    assert under(AllGather("context"), (2, 2 * DEVICES), True, "h100", jnp.float16) == both_ways(own, *before)


@pytest.mark.parametrize("target", ["h100", "a100"])
def test_all_visible(target):
    assert under(Ring("context"), (2, 2), False, target) == both_ways((LOCAL, LOCAL, "NO_MASK"))
