"""Nothing outlives a call: not in the drafter, not in the target, not in what the caller handed over."""

import contextlib
import copy
import threading

import pytest
import torch
from kit import (
    NudgedDrafter,
    RecordingStreamer,
    assert_not_vacuous,
    cache_of,
    dflow_greedy,
    plain_greedy,
    prompt_of,
    scripted,
    tiny_drafter,
    tiny_target,
)
from transformers import DynamicCache, StoppingCriteria, StoppingCriteriaList, set_seed

from hf_dflow import DFlowDrafter, DFlowGenerationConfig

NEW_TOKENS = 32
LONG, SHORT = prompt_of(40, seed=3), prompt_of(2, seed=4)
HALF = LONG.shape[1] // 2


def with_fresh_drafter(target, prompt):
    """Sequence and accepted lengths with objects that were never used before."""
    return with_drafter(tiny_drafter(target, drafter_class=NudgedDrafter), target, prompt)


def with_drafter(drafter, target, prompt):
    text = plain_greedy(target, prompt, NEW_TOKENS + 8)
    drafter.follow(text, prompt.shape[1])
    output = dflow_greedy(target, drafter, prompt, max_new_tokens=NEW_TOKENS)
    assert torch.equal(output.sequences, text[:, : prompt.shape[1] + NEW_TOKENS])
    assert_not_vacuous(output.statistics)
    return output.sequences.tolist(), output.statistics.per_step_accepted


def test_one_drafter_for_many_calls():
    """Context features, positions or feedback of an earlier call in a later one."""
    first, second = tiny_target("llama"), tiny_target("llama", seed=5)
    drafter = tiny_drafter(first, drafter_class=NudgedDrafter)
    for target, prompt in ((first, LONG), (first, SHORT), (first, LONG), (second, SHORT), (first, LONG)):
        assert with_drafter(drafter, target, prompt) == with_fresh_drafter(target, prompt)


class Interruption(Exception):
    pass


class BreakingCriterion(StoppingCriteria):
    def __call__(self, input_ids, scores, **kwargs):
        if input_ids.shape[1] == LONG.shape[1] + NEW_TOKENS // 2:
            raise Interruption
        return torch.zeros(1, dtype=torch.bool)


class BreakingStreamer(RecordingStreamer):
    def put(self, value):
        super().put(value)
        if len(self.puts) == NEW_TOKENS // 2:
            raise Interruption


@pytest.mark.parametrize("where", ["streamer", "criterion"])
def test_after_an_exception(where):
    """State that only the end of a call resets."""
    target = tiny_target("llama")
    drafter = scripted(NudgedDrafter, target, LONG, NEW_TOKENS)
    extra = {
        "streamer": {"streamer": BreakingStreamer()},
        "criterion": {"stopping_criteria": StoppingCriteriaList([BreakingCriterion()])},
    }
    with pytest.raises(Interruption):
        dflow_greedy(target, drafter, LONG, max_new_tokens=NEW_TOKENS, **extra[where])
    assert len(drafter.anchor_positions) > 2
    for prompt in (SHORT, LONG):
        assert with_drafter(drafter, target, prompt) == with_fresh_drafter(target, prompt)


class SharedDrafter(DFlowDrafter):
    """Pushed towards the text of the target whose head it is called with; two threads take turns, forward by forward.

    Holds nothing that a call writes, so that whatever is mixed up is the product's.
    """

    barrier = None
    meetings: list = []

    def draft_hidden(self, block_embeds, position_ids, extend, mask_for):
        if self.barrier is not None:
            with contextlib.suppress(threading.BrokenBarrierError):  # broken once the other call is through
                self.barrier.wait(timeout=60)
                self.meetings.append(position_ids[0, 0])
        hidden = super().draft_hidden(block_embeds, position_ids, extend, mask_for)
        return torch.cat([hidden, position_ids[..., None].to(hidden.dtype)], dim=-1)

    def compute_logits(self, hidden, target_head):
        logits = super().compute_logits(hidden[..., :-1], target_head)
        logits = logits / logits.std(dim=-1, keepdim=True)
        for slot, position in enumerate(hidden[0, :, -1].long().tolist()):
            logits[0, slot, self.texts[id(target_head)][position]] += 3.0
        return logits


def test_two_threads_share_a_drafter():
    """What belongs to one call kept on the drafter, where another call at the same time reads or overwrites it."""
    targets = [tiny_target("llama"), tiny_target("llama", seed=5)]
    prompts = [LONG, SHORT]
    drafter = tiny_drafter(targets[0], drafter_class=SharedDrafter)
    texts = [plain_greedy(target, prompt, NEW_TOKENS + 8)[0] for target, prompt in zip(targets, prompts, strict=True)]
    drafter.texts = {id(t.get_output_embeddings()): text.tolist() for t, text in zip(targets, texts, strict=True)}

    def call(i):
        return dflow_greedy(targets[i], drafter, prompts[i], max_new_tokens=NEW_TOKENS)

    alone = [call(0), call(1)]
    drafter.barrier, drafter.meetings = threading.Barrier(2), []
    together = {}

    def work(i):
        try:
            together[i] = call(i)
        finally:
            drafter.barrier.abort()

    threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
    assert len(drafter.meetings) >= 6
    for i in range(2):
        assert together[i].sequences.tolist() == alone[i].sequences.tolist()
        assert together[i].sequences[0].tolist() == texts[i][:-8].tolist()
        assert together[i].statistics.per_step_accepted == alone[i].statistics.per_step_accepted
        assert_not_vacuous(together[i].statistics)


def checksum(model):
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def test_nothing_of_the_callers_is_changed():
    """Options, ids, masks, weights or the global generator changed by a greedy call."""
    target = tiny_target("llama")
    drafter = scripted(NudgedDrafter, target, LONG, NEW_TOKENS)
    config = DFlowGenerationConfig(
        max_new_tokens=NEW_TOKENS, return_dict_in_generate=True, pad_token_id=0, repetition_penalty=1.1
    )
    mask, ids = torch.ones_like(LONG), LONG.clone()
    weights = checksum(target), checksum(drafter)
    attributes = set(vars(drafter)), set(vars(target))
    states = config.to_dict(), target.generation_config.to_dict(), target.config.to_dict(), drafter.config.to_dict()
    generator = torch.get_rng_state()
    target.generate(ids, attention_mask=mask, assistant_model=drafter, generation_config=config)
    assert torch.equal(torch.get_rng_state(), generator)
    assert torch.equal(ids, LONG) and torch.equal(mask, torch.ones_like(LONG))
    assert (
        config.to_dict(),
        target.generation_config.to_dict(),
        target.config.to_dict(),
        drafter.config.to_dict(),
    ) == states
    assert (set(vars(drafter)), set(vars(target))) == attributes
    for model, before in zip((target, drafter), weights, strict=True):
        after = checksum(model)
        assert after.keys() == before.keys()
        assert all(torch.equal(after[name], before[name]) for name in before)
        assert all(parameter.grad is None for parameter in model.parameters())


def test_greedy_does_not_depend_on_the_seed():
    """Random numbers drawn, and used, where nothing is sampled."""
    target = tiny_target("llama")
    results = []
    for seed in (0, 1):
        set_seed(seed)
        results.append(with_fresh_drafter(target, LONG))
    assert results[0] == results[1]


def empty_cache(target, knows_config):
    return DynamicCache(config=target.config) if knows_config else DynamicCache()


@pytest.mark.parametrize("family", ["llama", "gpt2", "mistral_sliding"])
@pytest.mark.parametrize("knows_config", [True, False])
def test_empty_cache_of_the_callers(family, knows_config, caplog):
    """A caller's cache replaced by another, or taken for one that holds a prefix."""
    target = tiny_target(family)
    drafter = scripted(NudgedDrafter, target, LONG, NEW_TOKENS)
    held = empty_cache(target, knows_config)
    output = dflow_greedy(target, drafter, LONG, max_new_tokens=NEW_TOKENS, past_key_values=held)
    assert torch.equal(output.sequences, plain_greedy(target, LONG, NEW_TOKENS))
    assert_not_vacuous(output.statistics)
    assert cache_of(output) is held
    assert held.get_seq_length() == LONG.shape[1] + NEW_TOKENS - 1
    assert not [record for record in caplog.records if record.name.startswith("hf_dflow")]


@pytest.mark.parametrize("family", ["llama", "gpt2", "mistral_sliding"])
def test_cache_that_holds_half_the_prompt(family, caplog):
    """Positions or rows counted from the start of what is computed instead of from the start of the text."""
    target = tiny_target(family)
    held = cache_of(plain_greedy(target, LONG[:, :HALF], 1, return_dict_in_generate=True))
    assert held.get_seq_length() == HALF
    plain = plain_greedy(target, LONG, NEW_TOKENS, past_key_values=copy.deepcopy(held))
    drafter = scripted(NudgedDrafter, target, LONG, NEW_TOKENS)
    output = dflow_greedy(target, drafter, LONG, max_new_tokens=NEW_TOKENS, past_key_values=held)
    assert torch.equal(output.sequences, plain)
    assert torch.equal(plain, plain_greedy(target, LONG, NEW_TOKENS))
    assert drafter.anchor_positions[0] == LONG.shape[1]
    assert_not_vacuous(output.statistics)
    warnings = [record.getMessage() for record in caplog.records if record.name.startswith("hf_dflow")]
    assert len(warnings) == 1 and f"already holds {HALF} tokens" in warnings[0]


@pytest.mark.parametrize("family", ["llama", "mistral_sliding"])
def test_conversation_goes_on_from_a_returned_cache(family):
    """A returned cache that only plain decoding can use, or that is a token ahead of its text."""
    target = tiny_target(family)
    first = dflow_greedy(target, scripted(NudgedDrafter, target, SHORT, 12), SHORT, max_new_tokens=12)
    turn = torch.cat([first.sequences, prompt_of(5, seed=9)], dim=1)
    drafter = scripted(NudgedDrafter, target, turn, NEW_TOKENS)
    second = dflow_greedy(target, drafter, turn, max_new_tokens=NEW_TOKENS, past_key_values=cache_of(first))
    assert torch.equal(second.sequences, plain_greedy(target, turn, NEW_TOKENS))
    assert_not_vacuous(second.statistics)
