"""Rotary embedding, against float64. (Huge positions: case 38.)"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxcp


def rotated(x, positions, frequencies):
    half = x.shape[-1] // 2
    turn = np.exp(1j * np.multiply.outer(np.asarray(positions, np.float64), frequencies))[..., None, :]
    z = (x[..., :half] + 1j * x[..., half:]) * turn
    return np.concatenate([z.real, z.imag], -1)


def frequencies(dim, theta=10_000.0):
    return theta ** (-np.arange(0, dim, 2) / dim)


X = np.random.default_rng(0).uniform(-1, 1, (2, 6, 3, 16)).astype(np.float32)
PLACES = np.array([0, 1, 2, 255, 257, 131_072])


@pytest.mark.parametrize("positions", [PLACES, PLACES[None], np.stack([PLACES, PLACES[::-1]])], ids=["T", "1T", "BT"])
@pytest.mark.parametrize("theta", [10_000.0, 500_000.0])
def test_float64_says_the_same(positions, theta):
    found = jaxcp.apply_rope(jnp.asarray(X), jnp.asarray(positions), theta=theta)
    assert np.abs(found - rotated(X, positions, frequencies(16, theta))).max() <= 1e-6


def test_scaling():
    found = jaxcp.apply_rope(jnp.asarray(X), PLACES, scaling=lambda angles: angles / 4)
    assert np.abs(found - rotated(X, PLACES / 4, frequencies(16))).max() <= 1e-6


def test_negative_positions_turn_back():
    there = jaxcp.apply_rope(jnp.asarray(X), PLACES)
    assert np.abs(jaxcp.apply_rope(there, -PLACES) - X).max() <= 2e-6


def test_the_gradient_turns_back():
    there, pull = jax.vjp(lambda x: jaxcp.apply_rope(x, PLACES), jnp.asarray(X))
    assert np.abs(pull(there)[0] - X).max() <= 2e-6


def test_only_differences_matter():
    """q at p and k at p - d have one product, wherever p is."""
    dot = lambda p: np.sum(
        np.asarray(jaxcp.apply_rope(jnp.asarray(X), np.full(6, p)), np.float64)
        * np.asarray(jaxcp.apply_rope(jnp.asarray(X[::-1]), np.full(6, p - 37)), np.float64),
        axis=-1,
    )
    assert np.abs(dot(37) - dot(2_000_000_000)).max() <= 1e-5


def test_dealt_rows_with_dealt_positions():
    layout = jaxcp.Zigzag(2)
    x, positions = layout.deal((X, PLACES[None]))
    found = jax.jit(jaxcp.apply_rope)(x, positions)
    assert np.abs(layout.undeal(found) - rotated(X, PLACES, frequencies(16))).max() <= 1e-6
