"""The output law of `verify_block` by exact enumeration on both backends: no sampling, so a bias of 1e-9 is visible."""

import itertools
from dataclasses import dataclass, replace

import kernel_kit
import numpy as np
import pytest
import torch
from kernel_kit import BACKENDS, JUST_BELOW_ONE, each_tensor, verify

from hf_dflow.kernels import VerifyInputs
from hf_dflow.kernels.torch_ops import accept_drafts

pytestmark = [kernel_kit.ignore_numpy_warnings, pytest.mark.parametrize("backend", BACKENDS)]

VOCAB = 3
EXACT = 1e-9  # float64 enumeration over at most 27 paths rounds at 1e-15; every real bias found was above 1e-4
BROKEN = 1e-3  # what a negative control must exceed
EDGE = 1e-6  # how near to both ends of a token's interval the draw is tried, as a share of the interval
RULES = ("token", "block")
LAWS = ("dense", "autoregressive", "point mass", "mixed")


@dataclass(frozen=True)
class Instance:
    """A target and a draft law over VOCAB tokens, one probability vector per prefix."""

    num_drafts: int
    target: dict[tuple[int, ...], np.ndarray]  # prefixes of length 0 … N
    draft: dict[tuple[int, ...], np.ndarray]  # prefixes of length 0 … N - 1: what drafts are really drawn from
    point_mass: tuple[bool, ...]  # [N]


def _prefixes(length: int):
    return itertools.product(range(VOCAB), repeat=length)


def make_instance(seed: int, num_drafts: int, law: str) -> Instance:
    rng = np.random.default_rng(seed)
    target = {x: rng.dirichlet(np.full(VOCAB, 0.7)) for n in range(num_drafts + 1) for x in _prefixes(n)}
    per_position = [rng.dirichlet(np.full(VOCAB, 0.7)) for _ in range(num_drafts)]
    point_mass = tuple(law == "point mass" or (law == "mixed" and i % 2 == seed % 2) for i in range(num_drafts))
    draft = {}
    for i in range(num_drafts):
        for prefix in _prefixes(i):
            draft[prefix] = rng.dirichlet(np.full(VOCAB, 0.7)) if law == "autoregressive" else per_position[i]
            if point_mass[i]:
                draft[prefix] = np.eye(VOCAB)[(seed + i) % VOCAB]
    return Instance(num_drafts, target, draft, point_mass)


def target_law(instance: Instance, prefix: tuple[int, ...] = ()) -> np.ndarray:
    """Law `[V, …]` of the tokens that complete `prefix` to N + 1 tokens."""
    probs = instance.target[prefix]
    if len(prefix) == instance.num_drafts:
        return probs
    return np.stack([probs[x] * target_law(instance, (*prefix, x)) for x in range(VOCAB)])


def inputs_of(instance: Instance, rule: str, paths: list[tuple[int, ...]], **options) -> VerifyInputs:
    """Inputs with one row for each path; uniforms are to be filled in."""
    slots = range(instance.num_drafts)
    draft_probs = np.array([[instance.draft[x[:i]] for i in slots] for x in paths])  # [B, N, V]
    draft_probs[:, list(instance.point_mass)] = np.nan  # under a point mass the stored law must not matter
    point_mass = torch.tensor([instance.point_mass] * len(paths))
    target_probs = np.array([[instance.target[x[:i]] for i in range(instance.num_drafts + 1)] for x in paths])
    return VerifyInputs(
        rule=rule,
        draft_ids=torch.tensor(paths),
        draft_logits=None if point_mass.all() else torch.tensor(draft_probs).log(),
        target_logits=torch.tensor(target_probs).log(),
        uniforms=torch.zeros(len(paths), instance.num_drafts + 1, dtype=torch.float64),
        point_mass=point_mass if point_mass.any() and not point_mass.all() else None,
        **options,
    )


def assert_bonus_law(inputs: VerifyInputs, law: torch.Tensor, backend: str) -> None:
    """Fails unless the last uniform draws exactly from `law` `[B, V]`: every token's interval is tried at both ends."""
    upper = law.cumsum(-1)
    margin = EDGE * law
    aims = torch.stack([upper - law + margin, upper - margin], dim=-1)  # [B, V, 2]
    rows, tokens, ends = (law > 1e-9)[..., None].expand_as(aims).nonzero(as_tuple=True)
    probes = each_tensor(inputs, lambda tensor: tensor[rows].clone())
    probes.uniforms[:, -1] = aims[rows, tokens, ends]
    assert torch.equal(verify(probes, backend, rows=128).bonus_ids, tokens), "the bonus has another law"


def outcomes(instance: Instance, rule: str, backend: str, claimed: Instance | None = None, **options):
    """Yield `(path, accepted length, probability, bonus law [V])` for every path and accepted length.

    `claimed` is the draft law that the op is told; the drafts always come from `instance`.
    """
    num_drafts = instance.num_drafts
    paths = list(_prefixes(num_drafts))
    inputs = inputs_of(claimed or instance, rule, paths, **options)
    draft_probs = [np.prod([instance.draft[x[:i]][x[i]] for i in range(num_drafts)]) for x in paths]
    for accepted in range(num_drafts + 1):
        inputs.uniforms[:, :num_drafts] = 0.0
        inputs.uniforms[:, accepted:num_drafts] = JUST_BELOW_ONE
        decision = verify(inputs, backend)
        weights = accept_drafts(inputs, inputs.uniforms).bonus_weights
        bonus_law = weights / weights.sum(-1, keepdim=True)
        assert_bonus_law(inputs, bonus_law, backend)
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
            yield path, accepted, draft_probs[row] * probability, bonus_law[row].numpy()


def law_error(instance: Instance, rule: str, backend: str, bonus_from_target: bool = False, **options) -> float:
    """Largest error of the law of the first N + 1 tokens, those after the bonus drawn from the target."""
    law = np.zeros((VOCAB,) * (instance.num_drafts + 1))
    for path, accepted, probability, bonus in outcomes(instance, rule, backend, **options):
        prefix = path[:accepted]
        bonus = instance.target[prefix] if bonus_from_target else bonus
        for token in range(VOCAB):
            rest = 1.0 if accepted == instance.num_drafts else target_law(instance, (*prefix, token))
            law[(*prefix, token)] += probability * bonus[token] * rest
    return float(np.abs(law - target_law(instance)).max())


def expected_length(instance: Instance, rule: str, backend: str) -> float:
    return sum(accepted * probability for _, accepted, probability, _ in outcomes(instance, rule, backend))


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("num_drafts", [1, 2, 3])
@pytest.mark.parametrize("rule", RULES)
def test_output_law_is_the_targets(rule, num_drafts, law, backend):
    """Bug: a wrong ratio, weight, residual, draw, row offset or point-mass rule (A2, A4): text that only looks
    plausible."""
    for seed in range(4 if backend == "torch" else 1):
        assert law_error(make_instance(seed, num_drafts, law), rule, backend) < EXACT


@pytest.mark.parametrize("rule", RULES)
def test_output_law_with_shorter_verification(rule, backend):
    """Bug: the last *verified* draft is judged as if another followed, or the row after it meets a draft law."""
    instance = make_instance(1, 3, "dense")
    for length in range(4) if backend == "torch" else (0, 2):
        assert law_error(instance, rule, backend, lengths=torch.full((27,), length)) < EXACT


@pytest.mark.parametrize("rule", RULES)
def test_output_law_with_a_broken_draft_law(rule, backend):
    """Bug (E4): a drafter that overflows to NaN at one slot biases the text, or makes the bonus junk."""
    instance = make_instance(2, 3, "dense")
    for slot in range(3) if backend == "torch" else (1,):
        broken = {x: probs * (np.nan if len(x) == slot else 1.0) for x, probs in instance.draft.items()}
        assert law_error(instance, rule, backend, claimed=replace(instance, draft=broken)) < EXACT


@pytest.mark.parametrize("law", LAWS)
def test_block_never_accepts_fewer_than_token(law, backend):
    """Bug: prefix weights or surplus masses off by one position can keep the law and still lose the gain."""
    gains = []
    for seed in range(12) if backend == "torch" else (0, 8):
        instance = make_instance(seed, 1 + seed % 3, law)
        block, token = (expected_length(instance, rule, backend) for rule in ("block", "token"))
        gains.append(block - token)
        assert gains[-1] > -EXACT
        if instance.num_drafts == 1:
            assert abs(gains[-1]) < EXACT  # with one draft the two rules are the same
    # Point masses leave nothing to win: a rejected token is one that the path can never redeem.
    assert max(gains) > (1e-3 if law != "point mass" else -EXACT)


@pytest.mark.parametrize("rule", RULES)
def test_control_corrupted_draft_probs(rule, backend):
    """Control: verifying with another law than the one that drew the drafts must be seen."""
    instance, other = (make_instance(seed, 2, "dense") for seed in (3, 4))
    assert law_error(instance, rule, backend, claimed=other) > BROKEN


@pytest.mark.parametrize("rule", RULES)
def test_control_point_mass_passed_as_sampled(rule, backend):
    """Control (A4): a copied draft verified as though it had been sampled must be seen."""
    instance, other = (make_instance(3, 2, law) for law in ("point mass", "dense"))
    assert law_error(instance, rule, backend, claimed=other) > BROKEN


@pytest.mark.parametrize("rule", RULES)
def test_control_bonus_from_the_target(rule, backend):
    """Control: a bonus from the target's law where the residual is due must be seen."""
    assert law_error(make_instance(3, 2, "dense"), rule, backend, bonus_from_target=True) > BROKEN


def test_control_forced_acceptance(backend):
    """Control: accepting everything (lossy by request) must be seen, so that "lossless" is never said of it."""
    instance, accept = make_instance(3, 2, "dense"), torch.ones(9, 2, dtype=torch.float64)
    assert law_error(instance, "token", backend, acceptance_probs=accept) > BROKEN


def test_given_acceptance_probs_are_the_only_change(backend):
    """Bug: lossy acceptance that also changes the residual; the rule's own values must give the rule back."""
    instance = make_instance(5, 2, "dense")
    paths = list(_prefixes(2))
    ratios = [[min(1.0, instance.target[x[:i]][x[i]] / instance.draft[x[:i]][x[i]]) for i in range(2)] for x in paths]
    given = torch.tensor(ratios, dtype=torch.float64)
    assert law_error(instance, "token", backend, acceptance_probs=given) < EXACT
