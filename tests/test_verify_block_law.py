"""The output law of `verify_block` by exact enumeration: no sampling, so a bias of 1e-9 is visible."""

import itertools
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

from hf_dflow.kernels import SparseLogits, verify_block

VOCAB = 3
EXACT = 1e-9  # float64 enumeration over at most 27 paths rounds at 1e-15; every real bias found was above 1e-4
BROKEN = 1e-3  # what a negative control must exceed
JUST_BELOW_ONE = float(np.nextafter(1.0, 0.0))
RULES = ("token", "block")
LAWS = ("dense", "autoregressive", "sparse", "point_mass", "mixed")


@dataclass(frozen=True)
class Instance:
    """A target and a draft law over VOCAB tokens, one probability vector per prefix."""

    num_drafts: int
    target: dict[tuple[int, ...], np.ndarray]  # prefixes of length 0 … N
    draft: dict[tuple[int, ...], np.ndarray]  # prefixes of length 0 … N - 1: what drafts are really drawn from
    point_mass: tuple[bool, ...]  # [N]
    sparse: bool = False


def _prefixes(length: int):
    return itertools.product(range(VOCAB), repeat=length)


def make_instance(seed: int, num_drafts: int, law: str) -> Instance:
    rng = np.random.default_rng(seed)
    target = {x: rng.dirichlet(np.full(VOCAB, 0.7)) for n in range(num_drafts + 1) for x in _prefixes(n)}
    per_position = [rng.dirichlet(np.full(VOCAB, 0.7)) for _ in range(num_drafts)]
    point_mass = tuple(law == "point_mass" or (law == "mixed" and i % 2 == seed % 2) for i in range(num_drafts))
    draft = {}
    for i in range(num_drafts):
        for prefix in _prefixes(i):
            probs = rng.dirichlet(np.full(VOCAB, 0.7)) if law == "autoregressive" else per_position[i].copy()
            if law == "sparse":
                probs[(seed + i) % VOCAB] = 0.0
            if point_mass[i]:
                probs = np.eye(VOCAB)[(seed + i) % VOCAB]
            draft[prefix] = probs / probs.sum()
    return Instance(num_drafts, target, draft, point_mass, law == "sparse")


def target_law(instance: Instance, prefix: tuple[int, ...] = ()) -> np.ndarray:
    """Law `[V, …]` of the tokens that complete `prefix` to N + 1 tokens."""
    probs = instance.target[prefix]
    if len(prefix) == instance.num_drafts:
        return probs
    return np.stack([probs[x] * target_law(instance, (*prefix, x)) for x in range(VOCAB)])


def _log(probs) -> torch.Tensor:
    return torch.tensor(np.array(probs), dtype=torch.float64).log()


def draft_law_of(instance: Instance, paths: list[tuple[int, ...]]):
    """The `draft_logits` and `point_mass` arguments for every path."""
    num_drafts = instance.num_drafts
    if all(instance.point_mass):
        return None, None
    probs = np.array([[instance.draft[x[:i]] for i in range(num_drafts)] for x in paths])  # [B, N, V]
    # Under a point mass the stored law must not matter, so it is poisoned.
    probs[:, list(instance.point_mass)] = np.nan
    point_mass = torch.tensor([instance.point_mass] * len(paths)) if any(instance.point_mass) else None
    if not instance.sparse:
        return _log(probs), point_mass
    ids = np.argsort(-probs, axis=-1, kind="stable")[..., : VOCAB - 1].copy()
    return SparseLogits(torch.tensor(ids), _log(np.take_along_axis(probs, ids, -1))), point_mass


def outcomes(instance: Instance, rule: str, lengths=None, claimed: Instance | None = None, **options):
    """Yield `(path, accepted length, probability, bonus law [V])` for every path and accepted length.

    `claimed` is the draft law that the op is told; the drafts always come from `instance`.
    """
    num_drafts = instance.num_drafts
    paths = list(_prefixes(num_drafts))
    arguments = {
        "draft_ids": torch.tensor(paths),
        "target_logits": _log([[instance.target[x[:i]] for i in range(num_drafts + 1)] for x in paths]),
        "lengths": lengths,
        "rule": rule,
        "return_residual": True,
        **options,
    }
    arguments["draft_logits"], arguments["point_mass"] = draft_law_of(claimed or instance, paths)
    draft_probs = [np.prod([instance.draft[x[:i]][x[i]] for i in range(num_drafts)]) for x in paths]
    for accepted in range(num_drafts + 1):
        uniforms = torch.zeros(len(paths), num_drafts + 1, dtype=torch.float64)
        uniforms[:, accepted:num_drafts] = JUST_BELOW_ONE
        decision = verify_block(uniforms=uniforms, **arguments)
        for row, path in enumerate(paths):
            accept = decision.acceptance_probs[row].numpy()
            fail = 1.0 - accept
            if rule == "token":
                probability = accept[:accepted].prod() * (fail[accepted] if accepted < num_drafts else 1.0)
            else:
                probability = (accept[accepted - 1] if accepted else 1.0) * fail[accepted:].prod()
            if draft_probs[row] * probability < 1e-15:
                continue
            assert decision.accepted_length[row] == accepted, "the forced outcome did not come out"
            yield path, accepted, draft_probs[row] * probability, decision.residual_probs[row].numpy()


def output_law(instance: Instance, rule: str, bonus_from_target: bool = False, **options) -> np.ndarray:
    """Law `[V] * (N + 1)` of the first N + 1 tokens, those after the bonus drawn from the target."""
    law = np.zeros((VOCAB,) * (instance.num_drafts + 1))
    for path, accepted, probability, bonus in outcomes(instance, rule, **options):
        prefix = path[:accepted]
        bonus = instance.target[prefix] if bonus_from_target else bonus
        for token in range(VOCAB):
            rest = 1.0 if accepted == instance.num_drafts else target_law(instance, (*prefix, token))
            law[(*prefix, token)] += probability * bonus[token] * rest
    return law


def law_error(instance: Instance, rule: str, **options) -> float:
    return float(np.abs(output_law(instance, rule, **options) - target_law(instance)).max())


def expected_length(instance: Instance, rule: str) -> float:
    return sum(accepted * probability for _, accepted, probability, _ in outcomes(instance, rule))


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("num_drafts", [1, 2, 3])
@pytest.mark.parametrize("rule", RULES)
def test_output_law_is_the_targets(rule, num_drafts, law):
    """Bug: a wrong ratio, residual, row offset or point-mass rule (A2, A4): text that only looks plausible."""
    for seed in range(4):
        assert law_error(make_instance(seed, num_drafts, law), rule) < EXACT


@pytest.mark.parametrize("rule", RULES)
def test_output_law_with_shorter_verification(rule):
    """Bug: the last *verified* draft is judged as if another followed, or the row after it meets a draft law."""
    instance = make_instance(1, 3, "dense")
    for length in range(4):
        assert law_error(instance, rule, lengths=torch.full((27,), length)) < EXACT


@pytest.mark.parametrize("rule", RULES)
def test_output_law_with_a_broken_draft_law(rule):
    """Bug (E4): a drafter that overflows to NaN at one slot biases the text, or makes the bonus junk."""
    instance = make_instance(2, 3, "dense")
    for slot in range(3):
        broken = {x: probs * (np.nan if len(x) == slot else 1.0) for x, probs in instance.draft.items()}
        assert law_error(instance, rule, claimed=replace(instance, draft=broken)) < EXACT


@pytest.mark.parametrize("law", LAWS)
def test_block_never_accepts_fewer_than_token(law):
    """Bug: prefix weights or S_i off by one position can keep the law and still lose the gain."""
    gains = []
    for seed in range(12):
        instance = make_instance(seed, 1 + seed % 3, law)
        gains.append(expected_length(instance, "block") - expected_length(instance, "token"))
        assert gains[-1] > -EXACT
        if instance.num_drafts == 1:
            assert abs(gains[-1]) < EXACT  # with one draft the two rules are the same
    # Point masses leave nothing to win: a rejected token is one that the path can never redeem.
    assert max(gains) > (1e-3 if law != "point_mass" else -EXACT)


@pytest.mark.parametrize("rule", RULES)
def test_control_corrupted_draft_probs(rule):
    """Control: verifying with another q than the one that drew the drafts must be seen."""
    instance = make_instance(3, 3, "dense")
    assert law_error(instance, rule, claimed=make_instance(4, 3, "dense")) > BROKEN


@pytest.mark.parametrize("rule", RULES)
def test_control_point_mass_passed_as_sampled(rule):
    """Control (A4): a looked-up draft verified as though it had been sampled must be seen."""
    instance = make_instance(3, 2, "point_mass")
    assert law_error(instance, rule, claimed=make_instance(3, 2, "dense")) > BROKEN


@pytest.mark.parametrize("rule", RULES)
def test_control_residual_from_target(rule):
    """Control: a bonus from p instead of max(p - q, 0) must be seen."""
    assert law_error(make_instance(3, 3, "dense"), rule, bonus_from_target=True) > BROKEN


def test_control_forced_acceptance():
    """Control: accepting everything (lossy by request) must be seen, so that "lossless" is never said of it."""
    instance = make_instance(3, 3, "dense")
    assert law_error(instance, "token", acceptance_probs=torch.ones(27, 3, dtype=torch.float64)) > BROKEN


def test_given_acceptance_probs_are_the_only_change():
    """Bug: lossy acceptance that also changes the residual; the rule's own values must give the rule back."""
    instance = make_instance(5, 2, "dense")
    paths = list(_prefixes(2))
    ratios = [[min(1.0, instance.target[x[:i]][x[i]] / instance.draft[x[:i]][x[i]]) for i in range(2)] for x in paths]
    assert law_error(instance, "token", acceptance_probs=torch.tensor(ratios, dtype=torch.float64)) < EXACT
