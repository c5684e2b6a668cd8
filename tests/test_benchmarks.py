"""Benchmarks run, small, and leave what they promise."""

import json

from benchmarks import attention


def test_attention(tmp_path, capsys):
    out = tmp_path / "result.json"
    flags = {"lengths": "64,128", "head-dim": 8, "repeats": 1, "balance-length": 128, "out": out}
    attention.main([part for name, value in flags.items() for part in ("--" + name, str(value))])
    printed = capsys.readouterr().out.splitlines()
    result = json.loads(printed[-1])
    assert result == json.loads(out.read_text())
    assert {(r["attention"], r["passes"]) for r in result["rows"] if r["length"] == 128} >= {
        (name, passes)
        for name in ("jax.nn", "jax.nn, sharded", "blockwise", "Ring", "AllGather", "Ulysses", "Ulysses(Ring)")
        for passes in ("forward", "forward+backward")
    }
    assert result["ratios"]["ring, zigzag: 128 over 64"] > 0 and len(result["balance"]) == 3
