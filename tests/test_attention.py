"""Every strategy, layout, mask, head count, dtype and number of shards gives the dense answer and its gradients."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxcp import Ring, Zigzag
from tests import cases, common, oracle

SEED, COUNT = 20261129, 72


def check(case: cases.Case):
    problem = case.problem()
    strategy, layout = case.call
    dtype = cases.DTYPES[case.dtype]
    found = common.attend(problem, strategy, layout, on=common.mesh(**case.axes), dtype=dtype, fast_compile=True)
    truth = oracle.solve(problem)
    if dtype == jnp.float32:
        error, name = oracle.worst(found, truth)
        assert error <= 1e-5, (name, error)
        return
    ours, theirs = (oracle.errors(x, truth) for x in (found, oracle.solve(problem, dtype)))
    if "dsinks" in theirs:  # so few numbers that dense is right by luck: test_sinks_in_bfloat16 has enough of them
        theirs["dsinks"] = max(theirs.values())
    for name in truth:
        assert ours[name] <= 2 * theirs[name], (name, ours[name], theirs[name])


@pytest.mark.parametrize("case", cases.sample(COUNT, SEED), ids=str)
def test_sample(case):
    """A sample of the grid."""
    check(case)


def test_sample_is_broad(capsys):
    """The sample meets every value of every dimension."""
    chosen = cases.sample(COUNT, SEED)
    for dimension, values in zip(cases.Case._fields, zip(*chosen, strict=True), strict=True):
        everything = {getattr(case, dimension) for case in cases.GRID}
        assert set(values) == everything, dimension
    with capsys.disabled():
        print(f"\ngrid: {COUNT} of {len(cases.GRID)} cases, seed {SEED}; all of them: pytest -m slow")


@pytest.mark.slow
@pytest.mark.parametrize("case", cases.GRID, ids=str)
def test_grid(case):
    """The whole grid."""
    check(case)


def test_sinks_in_bfloat16():
    """The gradient of the sinks, a number a head: its error over many draws against dense's."""
    errors = []
    for seed in range(16):
        problem = oracle.Problem.random((1, 64, 8, 16), sinks=True, is_causal=True, seed=seed)
        found = common.attend(problem, Ring("a"), Zigzag(2), on=common.mesh(a=2), dtype=jnp.bfloat16)
        right = oracle.solve(problem)["dsinks"]
        errors.append([np.square(x["dsinks"] - right).mean() for x in (found, oracle.solve(problem, jnp.bfloat16))])
    ours, theirs = np.sqrt(np.mean(errors, axis=0))
    assert ours <= 2 * theirs, (ours, theirs)
