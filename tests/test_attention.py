"""Every strategy, layout, mask, head count, dtype and number of shards gives the dense answer and its gradients."""

import jax.numpy as jnp
import numpy as np
import pytest

from tests import cases, common, oracle

SEED, COUNT = 20261129, 64
DRAWS = 24  # for the sinks' gradient in 16 bits


def check(case: cases.Case):
    dtype = cases.DTYPES[case.dtype]
    draws = DRAWS if dtype != jnp.float32 and cases.MASKS[case.mask].get("sinks") else 1
    problems = [case.problem(draw) for draw in range(draws)]
    run = common.program(problems[0], *case.call, dtype=dtype)
    found = [*common.run_on(problems, run, on=common.mesh(**case.axes), dtype=dtype, fast_compile=True)]
    truth = [*map(oracle.solve, problems)]
    ours = oracle.errors(found[0], truth[0])
    if dtype == jnp.float32:
        assert max(ours.values()) <= 1e-5, ours
        return
    dense = [oracle.solve(problem, dtype) for problem in problems]
    theirs = oracle.errors(dense[0], truth[0])
    if draws > 1:  # so few numbers that either may be right by luck: the error over many draws
        ours["dsinks"], theirs["dsinks"] = (_root_mean_square(x, truth, "dsinks") for x in (found, dense))
    for name in truth[0]:
        assert ours[name] <= 2 * theirs[name], (name, ours[name], theirs[name])


def _root_mean_square(found, truth, name):
    return np.sqrt(np.mean([np.square(f[name] - t[name]) for f, t in zip(found, truth, strict=True)]))


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
