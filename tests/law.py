"""The exact output law of the real loop by enumeration: the branches of a step, and how to drive the loop down one.

`generate` runs unchanged except that its random numbers are chosen: a step is handed a tensor of NaN, and the entries
that a draw is about to read are filled in once its law is known. What the loop reads, and where, is its own doing:
numbers that reach the wrong draw take it off the branch, which every drive asserts.
"""

import contextlib
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import internals
import kit
import numpy as np
import torch
from transformers import GPT2Config, GPT2LMHeadModel
from transformers.generation.streamers import BaseStreamer

from hf_dflow import DFlowGenerationConfig
from hf_dflow.kernels import VerifyInputs, draw_tokens, verify_block
from hf_dflow.kernels.torch_ops import accept_drafts

VOCAB = 3
PROMPT = torch.tensor([[1, 2, 1, 1]])  # no 0, which is the padding id
FIRST_TOKEN = 2  # the prefill's; its law is not part of what is enumerated
NEVER = 1e-15  # branches below this are rounding, and no float64 uniform leads there
PLAIN = kit.SAMPLED


def three_token_target(seed: int = 0) -> GPT2LMHeadModel:
    """A float64 target over 3 tokens. GPT-2, because RMSNorm and Llama's softmax drop to float32 inside."""
    sizes = {"vocab_size": VOCAB, "n_embd": 16, "n_layer": 3, "n_head": 2, "n_positions": 512}
    no_dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    config = GPT2Config(**sizes, **no_dropout, initializer_range=0.25, bos_token_id=None, eos_token_id=None)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        target = GPT2LMHeadModel._from_config(config, attn_implementation="eager")
    target.generation_config.pad_token_id = 0
    return target.double().eval().requires_grad_(False)


def three_token_drafter(target, block_size: int = 3, **overrides):
    """A drafter over the target's 3 tokens and a mask token of its own, so that it proposes all three."""
    own = {"vocab_size": VOCAB + 1, "mask_token_id": VOCAB, "input_embedding": "own", "output_head": "own"}
    one_layer = {"num_hidden_layers": 1, "layer_types": ["full_attention"]}
    return kit.tiny_drafter(target, block_size, **{**own, **one_layer, **overrides})


def fixed_law_target(law: list[float]) -> GPT2LMHeadModel:
    """A target that gives every next token the probabilities `law` over 3 tokens, whatever stands before it."""
    target = three_token_target()
    target.set_attn_implementation("sdpa")
    norm, head = target.transformer.ln_f, target.lm_head.weight
    with torch.no_grad():
        norm.weight.zero_()
        norm.bias.copy_(torch.linalg.pinv(head) @ torch.tensor(law, dtype=torch.float64).log())
    return target


def fixed_law_drafter(target, law: list[float], block_size: int):
    """A drafter that gives every draft the probabilities `law`."""
    drafter, logits = three_token_drafter(target, block_size), torch.tensor([*law, 0.0], dtype=torch.float64).log()
    drafter.compute_logits = lambda hidden, head: logits.expand(*hidden.shape[:-1], -1).clone()
    return drafter


@dataclass(frozen=True)
class Outcome:
    """One way in which a verification can end, and uniforms `[N + 1]` that lead there."""

    accepted: int
    bonus: int
    probability: float
    uniforms: torch.Tensor


@dataclass(frozen=True)
class Branch:
    """What a step is made to do: draft `path`, then end in `outcome(outcomes)`."""

    path: tuple[int, ...]
    outcome: Callable[[list[Outcome]], Outcome]


@dataclass
class Step:
    """What a step was seen to do."""

    numbers: torch.Tensor  # [1, 2 N + 1]
    draft_law: np.ndarray = field(default_factory=lambda: np.ones((0, VOCAB)))  # [N, V] the drafts were drawn from
    outcomes: list[Outcome] = field(default_factory=list)
    taken: Outcome | None = None


class OffSupport(Exception):
    """The path asked for has no probability."""


class _Enough(Exception):
    """The script is over."""


class _Collector(BaseStreamer):
    def __init__(self):
        self.tokens: list[int] = []

    def put(self, value):
        self.tokens += value.flatten().tolist()

    def end(self):
        pass


def outcomes_of(inputs: VerifyInputs) -> list[Outcome]:
    """Every way in which `verify_block(inputs)` can end, with its exact probability."""
    num_drafts = inputs.draft_ids.shape[1]
    found = []
    for accepted in range(num_drafts + 1):
        probe = torch.zeros(1, num_drafts + 1, dtype=torch.float64)
        probe[:, accepted:num_drafts] = float(np.nextafter(1.0, 0.0))
        accept = verify_block(replace(inputs, uniforms=probe)).acceptance_probs[0].double().numpy()
        uniforms = np.where(np.arange(num_drafts) < accepted, accept / 2, (1 + accept) / 2)
        if inputs.rule == "token":
            probability = accept[:accepted].prod() * (1 - accept[accepted : accepted + 1]).prod()
            uniforms[accepted + 1 :] = 0.5
        else:
            probability = accept[accepted - 1 : accepted].prod() * (1 - accept[accepted:]).prod()
            uniforms[: max(0, accepted - 1)] = 0.5
        if probability < NEVER:
            continue
        law = accept_drafts(inputs, probe).bonus_weights[0].double().numpy()
        law = law / law.sum()
        for bonus in np.flatnonzero(law * probability > NEVER).tolist():
            numbers = torch.tensor([*uniforms, _inside(law, bonus)], dtype=torch.float64)
            found.append(Outcome(accepted, bonus, float(probability * law[bonus]), numbers))
    return found


def _inside(law: np.ndarray, token: int) -> float:
    """A number whose inverse CDF is `token`."""
    edges = np.concatenate([[0.0], law.cumsum()]) / law.sum()
    return float(edges[token] + edges[token + 1]) / 2


class Loop:
    """`generate` with scripted random numbers, and everything its steps were seen to do.

    Args:
        alter (`Callable[[VerifyInputs], VerifyInputs]`, *optional*): Changes what `verify_block` is given, for negative
            controls.
        options: Of [`DFlowGenerationConfig`].
    """

    def __init__(self, monkeypatch, target, drafter, *, alter=None, max_new_tokens: int = 16, **options):
        self.target, self.drafter, self.alter = target, drafter, alter or (lambda inputs: inputs)
        self.config = DFlowGenerationConfig(**{**PLAIN, "max_new_tokens": max_new_tokens, "pad_token_id": 0, **options})
        internals.script_random_numbers(monkeypatch, self._uniforms, self._draw, self._verify)

    def run(self, script: list[Branch]) -> list[Step]:
        """Prefill, then one step for each branch; asserts that the loop commits the branches' tokens and no others."""
        self.steps: list[Step] = []
        self.script = [Branch((), lambda found: next(o for o in found if o.bonus == FIRST_TOKEN)), *script]
        collector = _Collector()
        with contextlib.suppress(_Enough):
            self.target.generate(
                PROMPT, assistant_model=self.drafter, generation_config=self.config, streamer=collector
            )
        assert len(self.steps) == len(self.script), "the loop ended before the script"
        expected = PROMPT[0].tolist()
        for step, branch in zip(self.steps, self.script, strict=True):
            expected += [*branch.path[: step.taken.accepted], step.taken.bonus]
        assert collector.tokens == expected, "the loop left the branch"
        return self.steps[1:]

    def _uniforms(self, num_drafts: int):
        if len(self.steps) == len(self.script):
            raise _Enough
        numbers = torch.full((1, 2 * num_drafts + 1), torch.nan, dtype=torch.float64)
        self.steps.append(Step(numbers))
        return numbers[:, :num_drafts], numbers[:, num_drafts:]

    def _draw(self, logits: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
        step, path = self.steps[-1], self.script[len(self.steps) - 1].path
        drawn, law = len(step.draft_law), logits[0].double().softmax(-1).numpy()  # of all drafts, or of the next
        step.draft_law = np.concatenate([step.draft_law, law])
        path = path[drawn : drawn + len(law)]
        if any(law[i][token] < NEVER for i, token in enumerate(path)):
            raise OffSupport
        for i, token in enumerate(path):
            step.numbers[0, drawn + i] = _inside(law[i], token)
        token_ids = draw_tokens(logits, uniforms)
        assert token_ids[0].tolist() == list(path), "the loop drafted another path"
        return token_ids

    def _verify(self, inputs: VerifyInputs, backend: str):
        inputs = self.alter(inputs)
        num_drafts = inputs.draft_ids.shape[1]
        step, branch = self.steps[-1], self.script[len(self.steps) - 1]
        step.outcomes = outcomes_of(inputs)
        step.taken = branch.outcome(step.outcomes)
        if len(step.taken.uniforms) + num_drafts == step.numbers.shape[1]:
            step.numbers[0, num_drafts:] = step.taken.uniforms  # the loop hands these on
        else:  # the block was cut
            inputs = replace(inputs, uniforms=step.taken.uniforms[None])
        decision = verify_block(inputs, backend)
        assert (int(decision.accepted_length), int(decision.bonus_ids)) == (step.taken.accepted, step.taken.bonus)
        return decision


def branches(loop: Loop, num_steps: int, num_drafts: int = 2) -> Iterator[tuple[tuple[int, ...], float, list[Step]]]:
    """Yield `(committed tokens, probability, steps)` of every branch of `num_steps` steps after the prefill.

    The loop is driven down every branch but the last step's; there it takes each outcome in turn.
    """
    turn = itertools.count()

    def explore(script, committed, probability):
        for path in itertools.product(range(VOCAB), repeat=num_drafts):
            number = next(turn)
            try:
                steps = loop.run([*script, Branch(path, lambda found: found[number % len(found)])])  # noqa: B023
            except OffSupport:
                continue
            last = steps[-1]
            drafted = probability * np.prod([law[token] for law, token in zip(last.draft_law, path, strict=True)])
            assert abs(sum(outcome.probability for outcome in last.outcomes) - 1) < 1e-6
            for end in last.outcomes:
                tokens, weight = (*committed, *path[: end.accepted], end.bonus), drafted * end.probability
                if len(steps) == num_steps:
                    yield tokens, weight, steps
                else:
                    yield from explore([*script, Branch(path, _same(end))], tokens, weight)

    yield from explore([], (), 1.0)


def _same(wanted: Outcome) -> Callable[[list[Outcome]], Outcome]:
    return lambda found: next(o for o in found if (o.accepted, o.bonus) == (wanted.accepted, wanted.bonus))


def target_law(target, length: int, temperature: float = 1.0) -> np.ndarray:
    """The target's own law `[V] * length` of the tokens after prompt and first token."""
    continuations = torch.tensor(list(itertools.product(range(VOCAB), repeat=length)))
    start = torch.cat([PROMPT[0], torch.tensor([FIRST_TOKEN])]).expand(len(continuations), -1)
    logits = target(torch.cat([start, continuations], dim=1)).logits[:, start.shape[1] - 1 : -1]
    probs = (logits.float() / temperature).double().softmax(-1)  # float32 logits, as plain generation has them
    drafted = probs.gather(-1, continuations[..., None])[..., 0]
    return drafted.prod(-1).numpy().reshape((VOCAB,) * length)


def law_error(loop: Loop, num_steps: int, num_drafts: int = 2, temperature: float = 1.0) -> float:
    """Largest error of the law of the first `num_steps * (num_drafts + 1)` tokens after the first.

    A branch that commits fewer is continued by the target's own law.
    """
    truth = target_law(loop.target, num_steps * (num_drafts + 1), temperature)
    law = np.zeros_like(truth)
    for tokens, probability, _ in branches(loop, num_steps, num_drafts):
        law[tokens] += probability * truth[tokens] / truth[tokens].sum()
    return float(np.abs(law - truth).max())
