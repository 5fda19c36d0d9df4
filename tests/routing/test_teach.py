"""From inputs to a judged router: splits, teaching, calibration, judgement."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import understudy as us
from understudy.errors import UnderstudyError
from understudy.lens.joint import gated_together
from understudy.lens.subsets import largest
from understudy.routing.calibrate import calibrated
from understudy.routing.evaluate import agreement, calibrations, judge
from understudy.routing.fit import Settings
from understudy.routing.router import Router
from understudy.routing.splits import Splits, digits_splits, moved_digits, split
from understudy.routing.teach import Teacher
from understudy.routing.trial import trial

QUICK = Settings(epochs=2, batch=16)


@pytest.fixture(scope="module")
def model():
    return us.load("digits-12")


@pytest.fixture(scope="module")
def parts():
    return digits_splits(48, validation=8, test=24)


def teacher(model, parts, **options):
    return Teacher.of(model, parts.training, parts.validation, settings=QUICK, **options)


@pytest.fixture(scope="module")
def routers(model, parts):
    made = teacher(model, parts)
    first = [made.pairs(seed=seed) for seed in (17, 23)]
    return [*first, *(made.subsets(router) for router in first)]


@pytest.fixture(scope="module")
def judged(model, parts, routers):
    return judge(model, parts.test, routers, seeds=(1, 2))


def test_splits_never_touch():
    parts = digits_splits()
    assert [len(part) for part in (parts.training, parts.validation, parts.test)] == [4096, 64, 448]
    originals = {name.partition(",")[0] for name in parts.training.ids}
    assert not originals & {*parts.validation.ids, *parts.test.ids}
    assert not set(parts.validation.ids) & set(parts.test.ids)
    inputs = us.digits(30)
    with pytest.raises(UnderstudyError, match=r"inputs are in both the validation and the test inputs"):
        Splits(inputs.take(range(9)), inputs.take(range(9, 20)), inputs.take(range(19, 30)))
    cut = split(inputs, test=5, validation=4)
    together = [*cut.test.ids, *cut.validation.ids, *cut.training.ids]
    assert sorted(together) == sorted(inputs.ids)
    assert together != list(inputs.ids)  # a folder sorted by classes is mixed
    assert split(inputs, test=5, validation=4).test.ids == cut.test.ids
    with pytest.raises(UnderstudyError, match="30 inputs cannot be cut"):
        split(inputs, test=20, validation=10)


def test_a_moved_digit_depends_on_its_place_alone():
    inputs = moved_digits(2000)
    whole, alone = inputs.batch([5, 1300])["pixel_values"], inputs.batch([1300])["pixel_values"]
    assert torch.equal(whole[1:], alone)
    assert inputs.ids[1300] == f"{inputs.ids[1300 - 1198].partition(',')[0]}, moved 1"
    assert not torch.equal(inputs.batch([102])["pixel_values"], alone)


def test_the_same_seed_gives_the_same_router_and_what_is_kept_is_not_fitted_again(model, parts, routers, tmp_path):
    made = teacher(model, parts, folder=tmp_path)
    again = made.pairs(seed=17)
    for name, value in routers[0].network.state_dict().items():
        assert torch.equal(value, again.network.state_dict()[name]), name
    assert again.card == routers[0].card
    stamp = (tmp_path / "R1-17" / "router.safetensors").stat().st_mtime_ns
    kept = teacher(model, parts, folder=tmp_path).pairs(seed=17)
    assert kept.card == again.card
    assert (tmp_path / "R1-17" / "router.safetensors").stat().st_mtime_ns == stamp
    other = Teacher.of(
        model, parts.training, parts.validation, settings=Settings(epochs=1, batch=16), folder=tmp_path
    ).pairs(seed=17)
    assert other.card.how["settings"]["epochs"] == 1  # other settings are fitted anew


def test_joint_masks_make_another_router(routers):
    r1, r2 = routers[0], routers[2]
    assert (r1.card.stage, r2.card.stage, r2.card.seed) == ("R1", "R2", 17)
    assert r2.card.how["masks"] == 48
    assert not torch.equal(r1.network.units, r2.network.units)
    assert any("joint" in choice for choice in r2.card.how["choices"])


def test_judgement_is_what_gating_gives(model, parts, routers, judged):
    found = judged.policies
    assert {"oracle", "taylor", "magnitude", "random 1", "R1 17", "R2 23"} <= set(found["policy"].values)
    for router, name in ((routers[0], "R1 17"), (routers[3], "R2 23")):
        masks = router.choose(judged.z, 6).numpy()
        assert np.array_equal(found["subset"].sel(policy=name, keep=6), masks)
        kl = gated_together(model, parts.test, masks[:, None].astype(float))["kl"].to_numpy()[:, 0]
        assert np.allclose(found["kl"].sel(policy=name, keep=6), kl, rtol=1e-4, atol=1e-9)
    assert (found["kl"].sel(policy="oracle") <= found["kl"].min("policy") + 1e-7).all()
    means = judged.over_seeds()
    assert list(means["policy"].values) == ["oracle", "taylor", "magnitude", "R1", "R2", "random"]
    both = found["kl"].sel(policy=["R1 17", "R1 23"]).mean("policy")
    assert np.allclose(means["kl"].sel(policy="R1"), both)
    table = judged.table()
    gap = float((means["kl"].sel(policy="R2", keep=3) - means["kl"].sel(policy="taylor", keep=3)).mean())
    assert table.loc[(3, "R2"), "kl_gap"] == pytest.approx(gap)


def test_calibration_by_hand():
    chance = np.random.default_rng(0)
    S, alpha = chance.random((5, 6, 6)) - 0.3, 3 * chance.random((5, 6, 6))
    S[1] = np.nan
    retained = largest(chance.random((5, 6)), 2)
    found = calibrated(retained, S, alpha)
    for row in range(5):
        gates = {j: 1.0 for j in range(6) if retained[row, j]}
        for i in set(range(6)) - set(gates):
            best = max(gates, key=lambda j: S[row, i, j])
            if S[row, i, best] > 0:
                gates[best] += alpha[row, i, best] - 1
        expected = [min(max(gates[j], 0), 3) if j in gates else 0.0 for j in range(6)]
        assert np.allclose(found[row], expected)


def test_both_subsets_are_calibrated_alike(model, parts, routers, judged):
    found = calibrations(model, parts.test, judged)
    assert set(found) == {"learned", "oracle"}
    learned = found["learned"]
    assert list(learned["policy"].values) == ["R2 17", "taylor 17", "R2 23", "taylor 23"]
    said = routers[2].predict(judged.z)
    subset = judged.policies["subset"].sel(policy="taylor", keep=3).to_numpy()
    gates = calibrated(subset, said.S.numpy(), said.alpha.numpy())
    kl = gated_together(model, parts.test, gates[:, None])["kl"].to_numpy()[:, 0]
    assert np.allclose(learned["kl"].sel(policy="taylor 17", keep=3), kl, rtol=1e-4, atol=1e-9)
    # Measured S and alpha do not depend on the router.
    same = found["oracle"]["kl"]
    assert np.allclose(same.sel(policy="taylor 17"), same.sel(policy="taylor 23"), rtol=1e-4, atol=1e-9)


def test_what_is_chosen_online_is_what_is_chosen_offline(model, parts, routers):
    assert agreement(model, parts.test, routers[2], keep=3, batch=7) == 1.0


def test_a_trial_says_what_is_kept_and_lost(model, parts, routers, judged):
    found = trial(model, parts.test, [routers[2]], keep=6, batch=5)
    assert np.allclose(found.inputs["kl"], judged.policies["kl"].sel(policy="R2 17", keep=6), rtol=1e-3, atol=1e-8)
    assert found.kl == pytest.approx(found.inputs["kl"].mean())
    kept = [set(map(int, text.split())) for text in found.inputs["layer 3"]]
    masks = judged.policies["subset"].sel(policy="R2 17", keep=6).to_numpy()
    assert kept == [set(np.flatnonzero(mask)) for mask in masks]
    assert min(found.dense, found.routed) > 0


def test_wrong_use_is_told(model, parts, routers):
    with pytest.raises(UnderstudyError, match="keep=13 is not possible: of 12 heads, 1 to 12"):
        teacher(model, parts, keep=[3, 13])
    with pytest.raises(UnderstudyError, match="in both the training and the validation"):
        Teacher.of(model, parts.training, parts.training)
    with pytest.raises(UnderstudyError, match="at least one router"):
        judge(model, parts.test, [])
    with pytest.raises(UnderstudyError, match="same stage and seed"):
        judge(model, parts.test, [routers[0], routers[0]])
    with pytest.raises(UnderstudyError, match="keep=0 is not possible"):
        judge(model, parts.test, routers, keep=[0])
    with pytest.raises(UnderstudyError, match="This router is for 12 heads"):
        judge(us.load("digits"), parts.test, routers)
    with pytest.raises(UnderstudyError, match="no router of stage R9"):
        calibrations(model, parts.test, judge(model, parts.test, routers[:1], keep=[3], oracle=False), stage="R9")
    with pytest.raises(UnderstudyError, match="holds no router"):
        Router.load("nowhere")
