import numpy as np
import pytest
from pandas.testing import assert_frame_equal
from scipy import stats

from understudy.errors import UnderstudyError
from understudy.organize import coverage, effective_rank, gap, matched_oracle, one_sided, raw_oracle, summary

from .runs import as_run, random_S

pytestmark = pytest.mark.filterwarnings("error")


@pytest.fixture(scope="module")
def S():
    """Ten inputs at three layers: input 0 lost nearly all of its sources at layer 1, and input 3 all."""
    made = random_S(10, 3, 5, 5, invalid=0.1, seed=4)
    made[0, 1, 1:] = np.nan
    made[3, 1] = np.nan
    made[:, 2] *= 0.3
    return made


@pytest.fixture(scope="module")
def table(S):
    return summary(as_run(S, layers=[3, 7, 11]), taus=(0.25, 0.5), resamples=300)


def test_layers_are_averaged_as_the_rules_say(S, table):
    for row, layer in ((3, 0), (7, 1), (11, 2)):
        raws, matches, covers, exempt, ranks, gaps, sided = [], [], [], [], [], [], []
        for one in S[:, layer]:
            raws += [value for value in raw_oracle(one) if not np.isnan(value)]
            matches += [value for value in matched_oracle(one, 2) if not np.isnan(value)]
            gaps += [value for value in gap(one) if not np.isnan(value)]
            sided += [value for value in one_sided(one, 0.10) if not np.isnan(value)]
            if not np.isnan(one).all():
                covers.append(coverage(one, 0.25))
                exempt.append(coverage(one, 0.25, invalid="exempt"))
                ranks.append(effective_rank(one) / 5)
        expected = {
            "raw": np.mean(raws),
            "matched2": np.mean(matches),
            "cover25": np.mean(covers),
            "cover25_exempt": np.mean(exempt),
            "rank": np.mean(ranks),
            "gap_median": np.median(gaps),
            "gap_upper": np.quantile(gaps, 0.75),
            "one_sided_10": np.mean(sided),
        }
        for name, value in expected.items():
            assert table.loc[row, name] == pytest.approx(value, abs=1e-12), name
        assert table.loc[row, "invalid"] == 50 - len(raws)
        assert table.loc[row, "valid"] == pytest.approx(len(raws) / 50)
        assert table.loc[row, "empty"] == 10 - len(covers)
        assert table.loc[row, "inputs"] == 10


def test_oracles_weigh_pairs_not_inputs(S, table):
    by_input = [np.nanmean(raw_oracle(one)) for one in S[:, 1] if not np.isnan(one).all()]
    assert abs(table.loc[7, "raw"] - np.mean(by_input)) > 1e-3


def test_all_is_the_mean_of_layers_and_not_pooled(S, table):
    for name in ("raw", "matched2", "cover25", "cover50", "rank", "gap_median", "gap_upper", "one_sided_10", "valid"):
        assert table.loc["all", name] == pytest.approx(table.loc[[3, 7, 11], name].mean()), name
    assert abs(table.loc["all", "raw"] - np.nanmean(raw_oracle(S))) > 1e-3
    assert abs(table.loc["all", "gap_median"] - np.nanmedian(gap(S))) > 1e-3
    assert table.loc["all", "invalid"] == table.loc[[3, 7, 11], "invalid"].sum()
    assert table.loc["all", "empty"] == 1
    assert table.loc["all", "inputs"] == 10


def test_the_order_of_inputs_does_not_matter(S, table):
    order = np.random.default_rng(0).permutation(10)
    run = as_run(S, layers=[3, 7, 11]).isel(input=order)
    assert_frame_equal(summary(run, taus=(0.25, 0.5), resamples=300), table)


def test_intervals_are_those_of_runs_of_resampled_inputs(S):
    def of_drawn(index):
        drawn = as_run(S[index], layers=[3, 7, 11], inputs=[str(at) for at in range(10)])
        return (
            summary(drawn, taus=0.25, resamples=0).loc[[3, 7, "all"], ["raw", "rank", "gap_upper"]].to_numpy().ravel()
        )

    rng = np.random.default_rng(0)
    drawn = np.stack([of_drawn(rng.integers(0, 10, 10)) for _ in range(100)])
    low, high = np.quantile(drawn, [0.025, 0.975], axis=0)
    names = ["raw", "rank", "gap_upper"]
    found = summary(as_run(S, layers=[3, 7, 11]), taus=0.25, resamples=100).loc[[3, 7, "all"]]
    np.testing.assert_allclose(found[[f"{name}_low" for name in names]].to_numpy().ravel(), low, atol=1e-12)
    np.testing.assert_allclose(found[[f"{name}_high" for name in names]].to_numpy().ravel(), high, atol=1e-12)


def test_intervals_hold_the_number_and_widen_with_confidence(S, table):
    wide = summary(as_run(S, layers=[3, 7, 11]), confidence=0.99, resamples=300)
    for name in ("raw", "matched2", "cover50", "rank", "gap_median", "one_sided_10"):
        assert (table[f"{name}_low"] <= table[name]).all()
        assert (table[name] <= table[f"{name}_high"]).all()
        assert (wide[f"{name}_low"] <= table[f"{name}_low"]).all()
        assert (wide[f"{name}_high"] >= table[f"{name}_high"]).all()
    assert (wide["raw_low"] < table["raw_low"]).all()


def test_the_seed_decides(S):
    run = as_run(S)
    assert_frame_equal(summary(run, resamples=50, seed=1), summary(run, resamples=50, seed=1))
    assert (summary(run, resamples=50, seed=1)["raw_low"] != summary(run, resamples=50, seed=2)["raw_low"]).any()


def test_one_input_has_no_interval(S):
    found = summary(as_run(S[:1]))
    assert found["raw"].notna().all()
    ends = [name for name in found if name.endswith(("_low", "_high"))]
    assert len(ends) == 2 * len(["raw", "matched", "cover", "exempt", "rank", "median", "upper", "10", "25"])
    assert found[ends].isna().all(axis=None)


def test_a_layer_that_resamples_can_lose_has_no_interval(S):
    lost = S.copy()
    lost[1:, 1] = np.nan  # one input in ten still has valid sources at layer 1
    found = summary(as_run(lost), resamples=200)
    assert found.loc[1, "raw"] == pytest.approx(np.nanmean(raw_oracle(lost[0, 1])))
    assert np.isnan(found.loc[1, "raw_low"])
    assert found.loc[[0, 2, "all"], "raw_low"].notna().all()


def test_a_layer_of_which_nothing_is_known_is_not_in_the_mean(S):
    lost = S.copy()
    lost[:, 1] = np.nan
    found = summary(as_run(lost), resamples=20)
    assert found.loc[1, ["raw", "cover50", "rank", "gap_median"]].isna().all()
    assert found.loc["all", "raw"] == pytest.approx(found.loc[[0, 2], "raw"].mean())
    assert found.loc[1, "empty"] == 10


def test_exempt_is_a_column_only_where_it_differs(S):
    assert "cover50_exempt" in summary(as_run(S), resamples=0)
    whole = random_S(4, 2, 5, 5)
    assert not [name for name in summary(as_run(whole), resamples=0) if "exempt" in name]


def test_pairs_that_were_not_run_are_counted():
    lacking = random_S(4, 1, 5, 5)
    lacking[:, :, :, 0] = np.nan  # no source but unit 0 has all of its candidates
    found = summary(as_run(lacking), resamples=10)
    assert found.loc[0, "partial"] == 16
    assert found.loc[0, "invalid"] == 0
    assert found.loc[0, ["cover50", "rank", "gap_median", "one_sided_10"]].isna().all()
    assert found.loc[0, "raw"] == pytest.approx(np.nanmean(raw_oracle(lacking)))
    assert found.loc[0, "matched2"] == pytest.approx(matched_oracle(lacking, 2)[:, :, 0].mean())


def test_zero_is_read_from_the_run():
    S = np.full((2, 1, 2, 2), 5e-4)
    S[..., 0, 1] = 0.4
    assert summary(as_run(S, zero=0.0), resamples=0).loc[0, "one_sided_25"] == 0
    assert summary(as_run(S, zero=1e-3), resamples=0).loc[0, "one_sided_25"] == 1


def test_columns_are_named_after_what_was_asked(S):
    found = summary(as_run(S, seed=9), matched=3, taus=(0.07, 0.125, 1.0), resamples=5, seed=2)
    assert {"matched3", "cover7", "cover12.5", "cover100", "cover7_low"} <= set(found)
    assert found.index.tolist() == [0, 1, 2, "all"]
    told = {"model": "made", "seed": 9, "matched": 3, "taus": [0.07, 0.125, 1.0], "bootstrap_seed": 2, "resamples": 5}
    assert told.items() <= found.attrs.items()


def test_counts_are_whole_numbers(table):
    assert all(table[name].dtype.kind == "i" for name in ("invalid", "partial", "empty", "inputs"))


def test_wrong_options_are_refused(S):
    run = as_run(S)
    with pytest.raises(UnderstudyError, match=r"confidence is 95, but is a share in \(0, 1\): give 0\.95"):
        summary(run, confidence=95)
    with pytest.raises(UnderstudyError, match="resamples is -1: give some 2000, or 0"):
        summary(run, resamples=-1)
    with pytest.raises(UnderstudyError, match="size 0: give a whole number, matched >= 1"):
        summary(run, matched=0)
    with pytest.raises(UnderstudyError, match=r"tau is 50\.0"):
        summary(run, taus=(50,))


def test_a_plain_mean_has_the_interval_of_scipy():
    # With all sources valid Raw is a plain mean over inputs, of which SciPy makes the interval itself.
    S = random_S(30, 1, 2, 2, seed=6)
    values = raw_oracle(S)[:, 0].mean(axis=1)
    ends = stats.bootstrap((values,), np.mean, n_resamples=500, method="percentile", rng=np.random.default_rng(0))
    found = summary(as_run(S), resamples=500)
    assert found.loc[0, "raw_low"] == pytest.approx(ends.confidence_interval.low)
    assert found.loc[0, "raw_high"] == pytest.approx(ends.confidence_interval.high)
