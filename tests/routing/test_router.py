"""The router: what it sees, what it says, what it keeps, and whom it refuses."""

from __future__ import annotations

import itertools
import json

import numpy as np
import pytest
import torch

import understudy as us
from families import build
from understudy.anatomy import anatomy
from understudy.errors import UnderstudyError
from understudy.identity import fingerprint
from understudy.lens.joint import gated_together
from understudy.lens.subsets import utility
from understudy.routing import losses, subsets
from understudy.routing.fit import Settings, fit
from understudy.routing.lesson import Lesson, Masks, candidates, joint_masks, lesson, subset_pool, summaries
from understudy.routing.network import Prediction, RouterNetwork
from understudy.routing.residual import Places, places, summarize
from understudy.routing.router import Card, Router


def chance(*shape, seed=0):
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("keep", [1, 2, 4, 5])
def test_the_chosen_subset_is_the_best_of_all_by_brute_force(keep):
    S, share = chance(6, 5, 5) * 1.6 - 0.4, chance(6, 5, seed=1).softmax(-1)
    chosen = subsets.select(S, share, keep)
    for s, w, mask in zip(S, share, chosen, strict=True):
        best, first = -1.0, None
        for kept in itertools.combinations(range(5), keep):
            value = sum(
                float(w[i]) * (1.0 if i in kept else max(float(s[i, j].clamp(0, 1)) for j in kept)) for i in range(5)
            )
            if value > best + 1e-7:
                best, first = value, kept
        assert tuple(mask.nonzero()[:, 0].tolist()) == first


def test_the_integer_programme_finds_what_listing_finds(monkeypatch):
    S, share = chance(8, 7, 7) * 1.5 - 0.3, chance(8, 7, seed=1).softmax(-1)
    for keep in (2, 3, 6):
        listed = subsets.select(S, share, keep)
        monkeypatch.setattr(subsets, "LISTED", 6)
        solved = subsets.select(S, share, keep)
        monkeypatch.undo()
        values = [
            subsets.utilities(S, share, mask[:, None]).squeeze(1) for mask in (listed, solved)
        ]  # ties aside, the same sets; always the same utility
        assert torch.allclose(*values, atol=1e-6)
        assert (solved.sum(-1) == keep).all()


def test_more_than_twenty_units_are_chosen_from_exactly():
    S, share = chance(2, 24, 24), chance(2, 24, seed=1).softmax(-1)
    chosen = subsets.select(S, share, 3)
    every = subsets.listed(24, 3)
    best = subsets.utilities(S, share, every).amax(-1)
    assert torch.allclose(subsets.utilities(S, share, chosen[:, None])[:, 0], best, atol=1e-6)


def test_utilities_are_the_lenss_and_have_a_gradient():
    S, share = chance(3, 6, 6) * 2 - 0.5, chance(3, 6, seed=1).softmax(-1)
    retained = subsets.listed(6, 3)
    found = subsets.utilities(S, share, retained)
    assert np.allclose(found, utility(S.numpy(), share.numpy(), retained.numpy()), atol=1e-6)
    each = subsets.utilities(S, share, retained.expand(3, -1, -1))
    assert torch.equal(found, each)
    S.requires_grad_()
    subsets.utilities(S, share, retained).sum().backward()
    assert (S.grad != 0).any()


def test_a_budget_out_of_range_is_told():
    with pytest.raises(UnderstudyError, match="A budget of 7 is not possible: of 6 units, 1 to 6 can be kept"):
        subsets.select(chance(1, 6, 6), chance(1, 6), 7)


def test_the_network_is_the_papers_and_of_its_size():
    network = RouterNetwork(3 * 768, 12).eval()
    assert round(sum(p.numel() for p in network.parameters()) / 1e6, 3) == 0.826
    z = chance(2, 3 * 768)
    said = network(z)
    code = network.encoder((z - network.mean) / network.scale)
    e = network.units
    for i, j in ((0, 3), (7, 2), (5, 5)):  # φ put together for one pair
        phi = torch.cat([code, *(part.expand(2, -1) for part in (e[i], e[j], (e[i] - e[j]).abs(), e[i] * e[j]))], -1)
        trunk = torch.nn.functional.gelu(network.second(torch.nn.functional.gelu(network.first(phi))))
        expected = network.heads(trunk)[:, 0]
        assert torch.allclose(said.S[:, i, j], expected, atol=1e-5)
    assert said.weight.shape == (2, 12)
    assert (said.alpha >= 0).all()
    assert (said.alpha <= 3).all()
    assert torch.allclose(said.share.sum(-1), torch.ones(2))


def test_a_summary_is_anchor_mean_and_variance():
    X = chance(2, 5, 3)
    anchor = torch.tensor([[True, False, False, False, False]] * 2)
    rest = torch.tensor([[False, True, True, True, True], [False, True, True, False, False]])
    z = summarize(X, Places(anchor, rest))
    assert torch.allclose(z[0], torch.cat([X[0, 0], X[0, 1:].mean(0), X[0, 1:].var(0, unbiased=False)]))
    assert torch.allclose(z[1], torch.cat([X[1, 0], X[1, 1:3].mean(0), X[1, 1:3].var(0, unbiased=False)]), atol=1e-6)


def test_places_of_texts_leave_out_padding():
    body = anatomy(build("gpt2"))
    mask = torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1]])
    at = places(body, {"input_ids": torch.ones(2, 4, dtype=torch.long), "attention_mask": mask}, "next", 4)
    assert at.anchor.tolist() == [[False, False, True, False], [False, False, False, True]]
    assert at.rest.tolist() == mask.bool().tolist()
    bert = anatomy(build("bert"))
    ids = torch.ones(2, 4, dtype=torch.long)
    chosen = torch.tensor([[False, True, True, False], [False, False, True, False]])
    at = places(bert, {"input_ids": ids, "attention_mask": mask, "positions": chosen}, "masked", 4)
    assert at.anchor.tolist() == chosen.tolist()


def test_losses_are_least_where_the_router_is_right():
    S = chance(4, 5, 5)
    S[:, range(5), range(5)] = torch.nan
    S[0, 2] = torch.nan  # an invalid source
    weight, alpha = chance(4, 5, seed=1).softmax(-1), 3 * chance(4, 5, 5, seed=2)
    right = Prediction(S.nan_to_num(), alpha, weight.log())
    wrong = Prediction(1 - S.nan_to_num(), 3 - alpha, -weight.log())
    pool = subsets.listed(5, 2)
    masks = pool.expand(4, -1, -1)
    kl = -subsets.utilities(S.nan_to_num(), weight, pool)
    for name in ("ranking", "regression", "source_weight", "compensation", "structured", "joint", "regret"):
        values = [
            {
                "ranking": lambda said: losses.ranking(said.S, S),
                "regression": lambda said: losses.regression(said.S, S),
                "source_weight": lambda said: losses.source_weight(said.weight, weight),
                "compensation": lambda said: losses.compensation(said.alpha, alpha, S),
                "structured": lambda said: losses.structured(said, S, weight, pool),
                "joint": lambda said: losses.joint(said, masks, kl),
                "regret": lambda said: losses.regret(said, masks, kl),
            }[name](said)
            for said in (right, wrong)
        ]
        assert torch.isfinite(torch.stack(values)).all()
        assert values[0] < values[1], name


def test_a_mistake_costs_more_where_more_is_at_stake():
    S = chance(2, 4, 4)
    predicted = torch.stack([S[0], 1 - S[1]])  # right about the first input alone
    for loss in (losses.ranking, losses.regression):
        little, much = (loss(predicted, S, torch.tensor(stake)) for stake in ([9.0, 1.0], [1.0, 9.0]))
        assert little < loss(predicted, S) < much


def test_a_sampled_pool_favours_no_unit():
    pool = subset_pool(24, 12).double()
    assert len(pool) == 4096
    assert (pool.sum(-1) == 12).all()
    assert (pool.mean(0) - 0.5).abs().max() < 0.05


def test_neither_autocast_nor_inference_mode_changes_what_is_chosen(tmp_path):
    card = Card("m", "0", 0, 4, 8, "classes", (2,), "R1", 0)
    torch.manual_seed(0)
    Router(RouterNetwork(24, 4).eval(), card).save(tmp_path)
    X = 5 * chance(6, 5, 8)
    at = Places(torch.arange(5).expand(6, 5) == 0, torch.arange(5).expand(6, 5) > 0)
    truth = Router.load(tmp_path).predict(summarize(X, at))
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
        router = Router.load(tmp_path)
        found = router.predict(summarize(X, at))
    assert torch.equal(found.S, truth.S)
    assert torch.equal(router.predict(summarize(X, at)).S, truth.S)


@pytest.fixture(scope="module")
def taught():
    model, inputs = us.load("digits"), us.digits(12)
    return model, inputs, lesson(model, inputs, search="grid:3")


def test_a_lesson_is_what_was_measured(taught):
    model, inputs, found = taught
    run = us.measure(model, inputs, search="grid:3")
    assert np.allclose(found.S, run["substitutability"][:, 0], equal_nan=True)
    drop = run["drop"].values[:, 0]
    assert np.allclose(found.weight, drop / drop.sum(-1, keepdims=True), atol=1e-6)
    hidden = model.vit(pixel_values=inputs.batch(range(12))["pixel_values"], output_hidden_states=True).hidden_states
    X = hidden[3]  # the input of the last block
    expected = torch.cat([X[:, 0], X[:, 1:].mean(1), X[:, 1:].var(1, unbiased=False)], -1)
    assert torch.allclose(found.z, expected, atol=1e-4)


def test_candidates_are_different_subsets_and_hold_the_anchors(taught):
    _, _, found = taught
    masks = candidates(found, 3, said=None, count=12)
    assert masks.shape == (12, 12, 6)
    assert (masks.sum(-1) == 3).all()
    for row in masks:
        assert len({tuple(mask.tolist()) for mask in row}) == 12
    pool = subset_pool(6, 3).numpy()
    best = pool[utility(found.S.numpy(), found.weight.numpy(), pool).argmax(-1)]
    assert (masks[:, 0].numpy() == best).all()
    assert candidates(found, 5, said=None).shape[1] == 6  # no more subsets than there are


def test_the_joint_teachers_kl_is_that_of_gates(taught):
    model, inputs, found = taught
    masks = joint_masks(model, inputs, found, keep=[2], said=None, count=3)[2]
    kept = masks.retained[4, 1]
    gates = {(3, unit): float(kept[unit]) for unit in range(6)}
    pixels = inputs.batch([4])["pixel_values"]
    with torch.no_grad():
        dense = model(pixel_values=pixels).logits.double().log_softmax(-1)
        with us.gated(model, gates):
            other = model(pixel_values=pixels).logits.double().log_softmax(-1)
    expected = (dense.exp() * (dense - other)).sum()
    assert float(masks.kl[4, 1]) == pytest.approx(float(expected), rel=1e-3, abs=1e-6)
    with pytest.raises(
        UnderstudyError, match=r"The gates are \(12, 6\), but 12 inputs of 6 units need \(12, rows, 6\)"
    ):
        gated_together(model, inputs, np.ones((12, 6)))


def test_a_fit_learns_and_is_the_same_for_a_seed(taught):
    _, _, found = taught
    with_masks = Lesson(**{**vars(found), "masks": {3: Masks(candidates(found, 3, said=None, count=4), chance(12, 4))}})
    brief = Settings(epochs=3, batch=6)
    first, again, other = (fit(with_masks, keep=[3], seed=seed, settings=brief) for seed in (1, 1, 2))
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), again.parameters(), strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(first.parameters(), other.parameters(), strict=True))
    long = fit(found, keep=[3], seed=1, settings=Settings(epochs=250, batch=12))
    errors = [losses.regression(network(found.z).S, found.S) for network in (first, long)]
    assert errors[1] < 0.5 * errors[0]


@pytest.fixture(scope="module")
def router(taught):
    model, _, found = taught
    network = fit(found, keep=[3], seed=0, settings=Settings(epochs=5, batch=6))
    card = Card("digits", fingerprint(anatomy(model)), 3, 6, 48, "classes", (3,), "R1", 0)
    return Router(network, card)


def test_a_router_is_saved_and_read_as_it_was(router, taught, tmp_path):
    router.save(tmp_path / "router")
    again = Router.load(tmp_path / "router")
    assert again.card == router.card
    z = taught[2].z
    assert torch.equal(again.predict(z).S, router.predict(z).S)
    with pytest.raises(UnderstudyError, match="holds no router"):
        Router.load(tmp_path)
    (tmp_path / "router" / "router.safetensors").write_bytes(b"broken")
    with pytest.raises(UnderstudyError, match="cannot be read"):
        Router.load(tmp_path / "router")


def test_what_a_router_is_not_for_is_told(router, taught, tmp_path):
    model = taught[0]
    with pytest.raises(UnderstudyError, match="This router is for 6 heads, but layer 3 of digits-12 has 12"):
        router.check_model(us.load("digits-12"))
    with pytest.raises(UnderstudyError, match="has other weights or another architecture"):
        Router(router.network, Card(**{**vars(router.card), "model_hash": "other"})).check_model(model)
    with pytest.raises(UnderstudyError, match="for layer 9 of digits, but digits has 4 layers"):
        Router(router.network, Card(**{**vars(router.card), "layer": 9})).check_model(model)
    with pytest.raises(UnderstudyError, match="keep=7 is not possible: of 6 units, 1 to 6"):
        router.choose(taught[2].z, 7)
    bad = taught[2].z.clone()
    bad[2, 5] = torch.nan
    with pytest.raises(UnderstudyError, match=r"holds NaN or infinity \(the first is number 2"):
        router.choose(bad, 3)
    with pytest.raises(UnderstudyError, match="has 144 numbers"):
        router.predict(bad[:, :50])
    assert json.loads((router.save(tmp_path) / "router.json").read_text())["stage"] == "R1"


def test_summaries_of_texts_are_those_of_their_own_length():
    model = build("gpt2", torch.float32)
    ids = torch.randint(3, 60, (2, 9), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[0, 6:] = 0
    found = summaries(model, us.Inputs.of({"input_ids": ids, "attention_mask": mask}), layer=1)
    alone = summaries(model, us.Inputs.of({"input_ids": ids[:1, :6]}), layer=1)
    assert torch.allclose(found[:1], alone, atol=1e-5)
