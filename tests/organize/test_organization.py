import numpy as np
import pytest
import xarray as xr

from understudy.errors import UnderstudyError
from understudy.organize import (
    coverage,
    effective_rank,
    gap,
    matched_oracle,
    one_sided,
    organization,
    raw_oracle,
)

from .runs import as_run, random_S

pytestmark = pytest.mark.filterwarnings("error")


@pytest.fixture(scope="module")
def S():
    made = random_S(6, 3, 5, 5, invalid=0.2, dtype=np.float32)
    made[2, 1] = np.nan
    return made


def test_every_number_is_that_of_its_function(S):
    found = organization(as_run(S), matched=3, taus=(0.25, 0.75))
    np.testing.assert_array_equal(found["raw"], raw_oracle(S))
    np.testing.assert_array_equal(found["matched"], matched_oracle(S, 3))
    for tau in (0.25, 0.75):
        np.testing.assert_array_equal(found["coverage"].sel(tau=tau), coverage(S, tau))
        np.testing.assert_array_equal(found["coverage_exempt"].sel(tau=tau), coverage(S, tau, invalid="exempt"))
    np.testing.assert_allclose(found["rank"], effective_rank(S))
    np.testing.assert_allclose(found["rank_fraction"], effective_rank(S) / 5)
    for at in np.ndindex(6, 3):
        gaps = [value for value in gap(S[at]) if not np.isnan(value)]
        sided = [value for value in one_sided(S[at], 0.25) if not np.isnan(value)]
        expected = [np.median(gaps), np.quantile(gaps, 0.75), np.mean(sided)] if gaps else [np.nan] * 3
        names = ("gap_median", "gap_upper", "one_sided_25")
        np.testing.assert_allclose([found[name].values[at] for name in names], expected)
        assert found["invalid"].values[at] == np.isnan(S[at]).all(axis=1).sum()
    assert (found["one_sided_10"] >= found["one_sided_25"]).where(found["one_sided_25"].notnull(), True).all()
    assert int(found["partial"].sum()) == 0


def test_coordinates_and_attributes_are_kept(S):
    run = as_run(S, layers=[3, 7, 11], inputs=list("fedcba"), seed=5)
    found = organization(run, taus=0.5, invalid="exempt")
    assert found["raw"].dims == ("input", "layer", "source")
    assert found["coverage"].dims == ("input", "layer", "tau")
    assert found["layer"].to_numpy().tolist() == [3, 7, 11]
    assert found["input"].to_numpy().tolist() == list("fedcba")
    told = {"model": "made", "seed": 5, "matched": 2, "taus": [0.5], "invalid": "exempt"}
    assert told.items() <= found.attrs.items()


def test_one_reading_is_chosen_and_both_stand_beside_each_other(S):
    retained, exempt = organization(as_run(S)), organization(as_run(S), invalid="exempt")
    assert "coverage_exempt" not in exempt
    np.testing.assert_array_equal(exempt["coverage"], retained["coverage_exempt"])
    assert (retained["coverage"] > retained["coverage_exempt"]).any()


def test_an_input_without_valid_sources_is_nan_and_counted(S):
    found = organization(as_run(S)).isel(input=2, layer=1)
    assert found["invalid"] == 5
    for name in ("raw", "matched", "coverage", "coverage_exempt", "rank", "gap_median", "gap_upper", "one_sided_10"):
        assert found[name].isnull().all(), name


def test_a_pair_that_was_not_run_leaves_raw_alone(S):
    whole, lacking = S[:2].copy(), S[:2].copy()
    source = int(np.flatnonzero(~np.isnan(whole[0, 0]).all(axis=1))[0])
    substitute = int(np.nanargmin(whole[0, 0, source]))
    lacking[0, 0, source, substitute] = np.nan
    before, after = organization(as_run(whole)), organization(as_run(lacking))
    np.testing.assert_array_equal(after["raw"], before["raw"])
    cell = after.isel(input=0, layer=0)
    assert np.isnan(cell["matched"].values[source])
    for name in ("coverage", "coverage_exempt", "rank", "gap_median", "gap_upper", "one_sided_10", "one_sided_25"):
        assert cell[name].isnull().all(), name
        assert after[name].isnull().sum() == before[name].isnull().sum() + 1, name
    assert int(after["partial"].sum()) == int(cell["partial"]) == 1
    np.testing.assert_array_equal(after["invalid"], before["invalid"])


def test_zero_is_read_from_the_run():
    S = np.full((1, 1, 2, 2), 5e-4)
    S[..., 0, 1] = 0.4
    assert organization(as_run(S, zero=0.0))["one_sided_25"].item() == 0
    assert organization(as_run(S, zero=1e-3))["one_sided_25"].item() == 1


def test_a_stored_run_gives_the_same(S, tmp_path):
    run = as_run(S, inputs=np.array(list("abcdef"), dtype=object))  # strings of any length have a Zarr specification
    run.to_zarr(tmp_path / "run.zarr", consolidated=False)
    stored = xr.open_zarr(tmp_path / "run.zarr", consolidated=False, chunks=None)
    xr.testing.assert_identical(organization(stored), organization(run))


def test_the_order_of_dims_does_not_matter(S):
    run = as_run(S)
    xr.testing.assert_identical(
        organization(run.transpose("substitute", "layer", "source", "input")), organization(run)
    )


def test_units_alone_in_their_layer_are_all_nan():
    found = organization(as_run(np.full((2, 1, 1, 1), np.nan)))
    assert found[["raw", "matched", "coverage", "rank", "gap_median"]].to_array().isnull().all()


def test_what_is_no_run_is_refused(S):
    run = as_run(S)
    with pytest.raises(UnderstudyError, match=r"with 'substitutability', but this is \['drop'\]: give what `measure`"):
        organization(run.rename(substitutability="drop"))
    with pytest.raises(UnderstudyError, match="but this is DataArray"):
        organization(run["substitutability"])
    with pytest.raises(UnderstudyError, match=r"needs .*'layer'.*run\.sel\(layer=\[11\]\)"):
        organization(run.isel(layer=0))
    with pytest.raises(UnderstudyError, match=r"The run is empty .*'input': 0.*at least one input"):
        organization(run.isel(input=[]))


@pytest.mark.parametrize("taus", [(), (0.5, 0.5)])
def test_taus_are_some_and_different(S, taus):
    with pytest.raises(UnderstudyError, match="needs one or more different thresholds"):
        organization(as_run(S), taus=taus)
