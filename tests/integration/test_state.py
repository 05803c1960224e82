"""Nothing outlives a call: not in the drafter, not in the target, not in what the caller handed over."""

import contextlib
import gc
import sys
import threading

import kit
import pytest
import torch
from batches import LENGTHS, following, generate, new_tokens_of, padded, plain_ids, prompt, target_of, text
from hybrids import hybrid
from internals import check_of, clamping_mixers, draft_cache_numbers, forget_checks, watch_draft_caches
from transformers import LogitsProcessor, LogitsProcessorList, StoppingCriteriaList, set_seed

from hf_dflow import DFlowDrafter, DFlowGenerationConfig

NEW_TOKENS, BATCH_TOKENS = 32, 20
LONG, SHORT = kit.prompt_of(40, seed=3), kit.prompt_of(2, seed=4)


def with_fresh_drafter(target, prompt):
    """Sequence and accepted lengths with objects that were never used before."""
    return with_drafter(kit.tiny_drafter(target, drafter_class=kit.NudgedDrafter), target, prompt)


def with_drafter(drafter, target, prompt):
    text = kit.plain_greedy(target, prompt, NEW_TOKENS + 8)
    drafter.follow(text, prompt.shape[1])
    output = kit.dflow_greedy(target, drafter, prompt, max_new_tokens=NEW_TOKENS)
    assert torch.equal(output.sequences, text[:, : prompt.shape[1] + NEW_TOKENS])
    kit.assert_not_vacuous(output.statistics)
    return output.sequences.tolist(), output.statistics.per_step_accepted


def fresh_for_batches():
    return kit.tiny_drafter(target_of(), 8, drafter_class=kit.NudgedDrafter)


def batch_with(drafter, rows):
    """Accepted lengths of each row of a batch."""
    drafter.follow_rows([(text(row, BATCH_TOKENS + 8), LENGTHS[row]) for row in rows])
    output = generate(rows, drafter, BATCH_TOKENS)
    assert [new_tokens_of(output, i, rows) for i in range(len(rows))] == [plain_ids(row, BATCH_TOKENS) for row in rows]
    return [row.per_step_accepted for row in output.statistics.per_row]


# -- one drafter, many calls (C4)


def test_one_drafter_for_many_calls():
    """Context features, positions or feedback of an earlier call in a later one."""
    first, second = kit.shared_target(), kit.shared_target(seed=5)
    drafter = kit.tiny_drafter(first, drafter_class=kit.NudgedDrafter)
    for target, ids in ((first, LONG), (first, SHORT), (first, LONG), (second, SHORT), (first, LONG)):
        assert with_drafter(drafter, target, ids) == with_fresh_drafter(target, ids)


def test_one_drafter_for_batches_of_all_sizes():
    """Context, positions or feedback of an earlier call's rows in a later one's."""
    drafter, other = fresh_for_batches(), kit.shared_target(seed=5, attention="sdpa")
    for rows in ([7], [0, 1, 3], [2], [1, 0], [0, 1, 3], [5, 6, 7, 2]):
        assert batch_with(drafter, rows) == batch_with(fresh_for_batches(), rows)
        ids, mask = padded([prompt(2), prompt(3)])
        drafter.follow_rows([(kit.plain_greedy(other, prompt(row), 12), LENGTHS[row]) for row in (2, 3)])
        kit.dflow_greedy(other, drafter, ids, attention_mask=mask, max_new_tokens=4)


class Interruption(Exception):
    pass


def fails_at(length):
    def criterion(input_ids, scores, **kwargs):
        if input_ids.shape[1] > length:
            raise Interruption
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)

    return StoppingCriteriaList([criterion])


class BreakingStreamer(kit.RecordingStreamer):
    def put(self, value):
        super().put(value)
        if len(self.puts) == NEW_TOKENS // 2:
            raise Interruption


@pytest.mark.parametrize("where", ["streamer", "criterion"])
def test_after_an_exception(where, target):
    """State that only the end of a call resets."""
    drafter = kit.scripted(kit.NudgedDrafter, target, LONG, NEW_TOKENS)
    at_middle = fails_at(LONG.shape[1] + NEW_TOKENS // 2)
    extra = {"streamer": BreakingStreamer()} if where == "streamer" else {"stopping_criteria": at_middle}
    with pytest.raises(Interruption):
        kit.dflow_greedy(target, drafter, LONG, max_new_tokens=NEW_TOKENS, **extra)
    assert len(drafter.anchor_positions) > 2
    for ids in (SHORT, LONG):
        assert with_drafter(drafter, target, ids) == with_fresh_drafter(target, ids)


def test_after_an_exception_in_the_middle_of_a_batch():
    """Rows of an interrupted call that the next one resumes from."""
    drafter = following(kit.NudgedDrafter, [0, 1, 3], BATCH_TOKENS)
    criteria = fails_at(12 + BATCH_TOKENS // 2)
    with pytest.raises(Interruption):
        generate([0, 1, 3], drafter, BATCH_TOKENS, stopping_criteria=criteria, pad_token_id=0)
    for rows in ([1], [0, 1, 3]):
        assert batch_with(drafter, rows) == batch_with(fresh_for_batches(), rows)


# -- threads


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


def in_two_threads(work):
    threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=300)


def test_two_threads_share_a_drafter():
    """What belongs to one call kept on the drafter, where another call at the same time reads or overwrites it."""
    targets, prompts = [kit.shared_target(), kit.shared_target(seed=5)], [LONG, SHORT]
    drafter = kit.tiny_drafter(targets[0], drafter_class=SharedDrafter)
    texts = [
        kit.plain_greedy(target, prompt, NEW_TOKENS + 8)[0] for target, prompt in zip(targets, prompts, strict=True)
    ]
    drafter.texts = {id(t.get_output_embeddings()): text.tolist() for t, text in zip(targets, texts, strict=True)}

    def call(i):
        return kit.dflow_greedy(targets[i], drafter, prompts[i], max_new_tokens=NEW_TOKENS)

    alone = [call(0), call(1)]
    drafter.barrier, drafter.meetings = threading.Barrier(2), []
    together = {}

    def work(i):
        try:
            together[i] = call(i)
        finally:
            drafter.barrier.abort()

    in_two_threads(work)
    assert len(drafter.meetings) >= 6
    for i in range(2):
        assert together[i].sequences.tolist() == alone[i].sequences.tolist()
        assert together[i].sequences[0].tolist() == texts[i][:-8].tolist()
        assert together[i].statistics.per_step_accepted == alone[i].statistics.per_step_accepted
        kit.assert_not_vacuous(together[i].statistics)


def test_two_threads_decode_batches():
    """Rows of one thread's batch in another's."""
    drafter, batches, together = kit.tiny_drafter(target_of(), 8), ([0, 1, 3], [7, 2]), {}
    barrier = threading.Barrier(2)

    def work(i):
        barrier.wait(timeout=60)
        for _ in range(2):
            together[i] = generate(batches[i], drafter, BATCH_TOKENS)

    alone = [generate(rows, drafter, BATCH_TOKENS) for rows in batches]
    in_two_threads(work)
    for i, rows in enumerate(batches):
        assert torch.equal(together[i].sequences, alone[i].sequences)
        assert together[i].statistics == alone[i].statistics
        new = [new_tokens_of(together[i], j, rows) for j in range(len(rows))]
        assert new == [plain_ids(row, BATCH_TOKENS) for row in rows]


@pytest.mark.parametrize("family", ["qwen3_next", "nemotron_h"])
def test_two_threads_share_a_target_with_recurrent_layers(family):
    """Hooks that record another call's forwards, or limits of time steps and hooks that stay behind, where the calls
    change the target for a while; a self-check that takes the hooks of a call in progress away."""
    target = hybrid(family)
    texts = [kit.plain_greedy(target, kit.prompt_of(12, seed), NEW_TOKENS + 8) for seed in (3, 4)]
    forget_checks()
    limits = [mixer.time_step_limit for mixer in clamping_mixers(target)]
    outputs = {0: [], 1: []}
    interval = sys.getswitchinterval()

    def work(i):
        for _ in range(4):
            drafter = kit.tiny_drafter(target, 8, drafter_class=kit.PatternDrafter)
            drafter.pattern = [2, 4, 7, 0, 1]
            drafter.follow(texts[i], 12)
            outputs[i].append(kit.decode(target, drafter, texts[i][:, :12], NEW_TOKENS))

    sys.setswitchinterval(1e-5)
    try:
        in_two_threads(work)
    finally:
        sys.setswitchinterval(interval)
    for i in range(2):
        accepted = kit.scripted_steps([2, 4, 7, 0, 1], 8, NEW_TOKENS)[0]
        assert [output.sequences.tolist() for output in outputs[i]] == [texts[i][:, :-8].tolist()] * 4
        assert all(output.statistics.per_step_accepted == accepted for output in outputs[i])
    assert [mixer.time_step_limit for mixer in clamping_mixers(target)] == limits
    hooks = [hook for module in target.modules() for hook in module._forward_pre_hooks.values()]
    assert not any(hook.__module__.startswith("hf_dflow") for hook in hooks)


@pytest.mark.parametrize("family", ["qwen3_next", "nemotron_h"])
def test_plain_forward_of_another_thread_leaves_the_search_for_mixers_alone(family):
    """Hooks of a call that fire in a plain forward of another thread, which began before them and ends among them."""
    target, own = hybrid(family), threading.get_ident()
    text = kit.plain_greedy(target, kit.prompt_of(12, 3), NEW_TOKENS + 8)
    drafter = kit.tiny_drafter(target, 8, drafter_class=kit.PatternDrafter).follow(text, 12)
    drafter.pattern = [2, 4, 7, 0, 1]
    check_of(target)
    is_inside, may_go_on, others = threading.Event(), threading.Event(), []
    beside = threading.Thread(target=lambda: others.append(target(text[:, :5])))

    def meet(*_):
        if threading.get_ident() != own:
            is_inside.set()
            assert may_go_on.wait(60)
        elif not may_go_on.is_set():  # in the prefill
            may_go_on.set()
            beside.join(60)

    handle = target.get_decoder().layers[-1].register_forward_pre_hook(meet)
    try:
        beside.start()
        assert is_inside.wait(60)
        output = kit.decode(target, drafter, text[:, :12], NEW_TOKENS)
    finally:
        may_go_on.set()
        handle.remove()
    assert torch.equal(output.sequences, text[:, :-8]) and len(others) == 1
    kit.assert_not_vacuous(output.statistics)


# -- what the caller handed over


class Remembers(LogitsProcessor):
    def __init__(self):
        self.calls = 0

    def __call__(self, input_ids, scores):
        self.calls += 1
        return scores


@pytest.mark.parametrize("num_rows", [1, 3])
def test_nothing_of_the_callers_is_changed(num_rows):
    """Options, ids, masks, weights, processors or the global generator changed by a greedy call."""
    target, rows = kit.tiny_target(attention="sdpa"), [0, 1, 3][:num_rows]
    drafter, processor = following(kit.NudgedDrafter, rows, BATCH_TOKENS), Remembers()
    ids, mask = padded([prompt(row) for row in rows])
    options = {"repetition_penalty": 1.1, "eos_token_id": [5, 6], "do_sample": False, "pad_token_id": 0}
    config = DFlowGenerationConfig(max_new_tokens=BATCH_TOKENS, return_dict_in_generate=True, **options)

    def everything():
        configs = [config, target.generation_config, target.config, drafter.config]
        weights = [kit.weights_of(model) for model in (target, drafter)]
        attributes = set(vars(drafter)) - {"drafting_rows"}, set(vars(target))
        tensors = [ids.clone(), mask.clone(), torch.get_rng_state()]
        return [part.to_dict() for part in configs], attributes, weights, tensors

    before = everything()
    processors = LogitsProcessorList([processor])
    target.generate(ids, attention_mask=mask, assistant_model=drafter, generation_config=config,
                    logits_processor=processors)  # fmt: skip
    after = everything()
    assert after[:2] == before[:2]
    torch.testing.assert_close(after[2:], before[2:], atol=0, rtol=0)
    assert all(parameter.grad is None for model in (target, drafter) for parameter in model.parameters())
    assert (processor.calls == 0) == (num_rows > 1)  # each row of a batch has its own copy


def test_greedy_does_not_depend_on_the_seed(target):
    """Random numbers drawn, and used, where nothing is sampled."""
    results = []
    for seed in (0, 1):
        set_seed(seed)
        before = torch.get_rng_state()
        results.append(with_fresh_drafter(target, LONG))
        assert torch.equal(torch.get_rng_state(), before)
    assert results[0] == results[1]


# -- memory (H3)


def test_nothing_is_kept_after_the_call(monkeypatch, target):
    """Features or draft caches that outlive the call, in a drafter that serves for weeks."""
    caches = watch_draft_caches(monkeypatch)
    output = kit.decode(target, kit.tiny_drafter(target, 4), kit.prompt_of(9), 20)
    gc.collect()
    assert len(caches) == 1 and caches[0]() is None
    assert kit.cache_of(output) is not None


def test_a_draft_cache_keeps_keys_and_values_only(target):
    """Features kept beside the keys and values made of them: a token costs two vectors a layer, no more."""
    drafter = kit.tiny_drafter(target, 4)
    features = torch.randn(2, 100, drafter.fc.in_features, dtype=torch.float64)
    config = drafter.config
    a_token = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
    # Two rows, in buffers at most twice as long as what they hold.
    assert draft_cache_numbers(drafter, features, [100, 60]) <= 2 * 2 * 100 * a_token


def test_prefill_computes_logits_for_the_last_token_only():
    """Logits of a whole prompt, which are larger than everything else together."""
    target, shapes = kit.tiny_target(), []
    target.lm_head.register_forward_hook(lambda module, args, output: shapes.append(output.shape[1]))
    kit.dflow_greedy(target, kit.tiny_drafter(target, 4), kit.prompt_of(30), max_new_tokens=8)
    assert shapes[0] == 1 and max(shapes) <= 4
