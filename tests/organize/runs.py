"""Runs made of random numbers, for tests."""

import numpy as np
import xarray as xr

DIMS = ("input", "layer", "source", "substitute")


def random_S(*shape, seed=0, invalid=0.0, dtype=np.float64):
    """S of the given shape [..., H, H]: a NaN diagonal, exact zeros, and a share of invalid sources."""
    rng = np.random.default_rng(seed)
    S = np.maximum(rng.uniform(-0.3, 1.0, shape), 0.0).astype(dtype)
    S[rng.random(shape[:-1]) < invalid] = np.nan
    S[..., np.arange(shape[-1]), np.arange(shape[-1])] = np.nan
    return S


def as_run(S, *, inputs=None, layers=None, **attrs):
    """A run of S, [input, layer, source, substitute]."""
    names = [f"image-{index:03}" for index in range(len(S))] if inputs is None else inputs
    coords = {
        "input": names,
        "layer": list(range(S.shape[1])) if layers is None else layers,
        "source": np.arange(S.shape[2]),
        "substitute": np.arange(S.shape[3]),
    }
    told = {
        "model": "made",
        "units": "heads",
        "search": "grid:31",
        "threshold": 1e-5,
        "outcome": "classes",
        "zero": 0.0,
    }
    return xr.Dataset({"substitutability": (DIMS, S)}, coords, {**told, **attrs})
