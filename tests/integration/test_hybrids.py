"""Targets with recurrent layers: what is rejected leaves no trace in a state that cannot be cropped."""

import contextlib
import copy
import itertools

import kit
import pytest
import torch
from batches import padded
from hybrids import FAMILIES, IMAGE, followed, hybrid, image_inputs, multimodal_hybrid
from internals import DraftCache, RecurrentStates, capture_features, check_of, keep_time_steps_clamped
from law import VOCAB, Loop, law_error, three_token_drafter
from test_alignment import PROMPT_LENGTH, misaligned_slots, see_through_drafter, watch
from transformers import DynamicCache, StoppingCriteriaList
from transformers.cache_utils import DynamicLayer
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from hf_dflow import UnsupportedGenerationError

LENGTH, NEW_TOKENS, SLACK = 12, 48, 16  # prompt, what is generated, what scripts know beyond it
PATTERNS = {
    2: [1, 0, 0, 1, 1],
    4: [1, 2, 3, 0, 1, 3],
    8: [2, 4, 7, 0, 1, 7, 3],
    16: [3, 8, 15, 1, 0, 15],
}  # partial, partial again, then full; N is full
STATE = 2e-5  # largest difference of a returned state, in units of its largest entry: blocks round differently
LAW = 1e-5  # largest error of a law whose target computes in float32


def prompt_of(family: str) -> torch.Tensor:
    return followed(family, NEW_TOKENS + SLACK)[:, :LENGTH]


def follower(drafter_class, family: str, block_size: int = 8, **attributes):
    drafter = kit.tiny_drafter(hybrid(family), block_size, drafter_class=drafter_class)
    for name, value in attributes.items():
        setattr(drafter, name, value)
    return drafter.follow(followed(family, NEW_TOKENS + SLACK), LENGTH)


def pattern_drafter(family: str, block_size: int = 8):
    return follower(kit.PatternDrafter, family, block_size, pattern=PATTERNS[block_size])


def text(family: str, new_tokens: int = NEW_TOKENS) -> torch.Tensor:
    return followed(family, NEW_TOKENS + SLACK)[:, : LENGTH + new_tokens]


def states(cache) -> list[torch.Tensor]:
    """Everything that a cache holds."""
    held = []
    for layer in cache.layers:
        for name in ("conv_states", "recurrent_states"):
            held += [state for state in getattr(layer, name, {}).values() if state is not None]
        held += [getattr(layer, name) for name in ("keys", "values") if getattr(layer, name, None) is not None]
    return held


def difference(ours, plain) -> float:
    """Between two caches: the largest of any entry, in units of the largest entry of its tensor."""
    pairs = list(zip(states(ours), states(plain), strict=True))
    if any(state.shape != expected.shape for state, expected in pairs):
        return float("inf")
    return max(float((state - expected).abs().max() / expected.abs().max()) for state, expected in pairs)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("block_size", PATTERNS)
def test_text_is_plain_text(family, block_size):
    """A state that keeps what was rejected, or that lost what was accepted, behind every kind of acceptance."""
    output = kit.decode(hybrid(family), pattern_drafter(family, block_size), prompt_of(family), NEW_TOKENS)
    assert torch.equal(output.sequences, text(family))
    steps = list(zip(output.statistics.per_step_accepted, output.statistics.per_step_drafted, strict=True))
    expected = kit.scripted_steps(PATTERNS[block_size], block_size, NEW_TOKENS)
    assert [accepted for accepted, _ in steps] == expected[0]
    assert output.statistics.num_target_forwards == expected[2]  # no forward for the rollback
    is_partial = [accepted < drafted for accepted, drafted in steps]
    assert {(True, True), (True, False)} <= set(itertools.pairwise(is_partial))


@pytest.mark.parametrize(
    "family", ["qwen3_5_moe_text", "lfm2_moe", "bamba", "kimi_linear", "zaya", "zaya, sliding", "lara_mini", "lfm3"]
)
def test_further_families(family):
    """Mixers inside of mixers, several states in a layer, layers that slide beside recurrent ones, experts."""
    if family.partition(",")[0] not in CONFIG_MAPPING_NAMES:
        pytest.skip(f"this transformers has no {family}")
    output = kit.decode(hybrid(family), pattern_drafter(family), prompt_of(family), NEW_TOKENS)
    assert torch.equal(output.sequences, text(family))
    assert output.statistics.per_step_accepted == kit.scripted_steps(PATTERNS[8], 8, NEW_TOKENS)[0]
    plain = kit.plain_greedy(hybrid(family), prompt_of(family), NEW_TOKENS, return_dict_in_generate=True)
    assert difference(kit.cache_of(output), kit.cache_of(plain)) < STATE


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("drafter_class", [kit.OracleDrafter, kit.HostileDrafter, kit.NudgedDrafter])
def test_other_drafters(family, drafter_class):
    """Full acceptances alone, none at all, and a drafter whose own states, relay included, decide."""
    drafter = follower(drafter_class, family)
    output = kit.decode(hybrid(family), drafter, prompt_of(family), NEW_TOKENS)
    assert torch.equal(output.sequences, text(family))
    accepted = set(output.statistics.per_step_accepted)
    if drafter_class is kit.NudgedDrafter:
        kit.assert_not_vacuous(output.statistics)
    else:
        assert (0 in accepted) == (drafter_class is kit.HostileDrafter)


@pytest.mark.parametrize("family", FAMILIES)
def test_end_of_text_inside_a_block(family):
    """Rows behind an EOS kept in a state of the returned cache."""
    whole = text(family)
    position = next(  # inside the first block that is accepted whole, and said there for the first time
        i for i in range(LENGTH + 9, LENGTH + NEW_TOKENS) if whole[0, i] not in whole[0, LENGTH:i]
    )
    eos = int(whole[0, position])
    arguments = {"eos_token_id": eos, "max_new_tokens": NEW_TOKENS}
    output = kit.decode(hybrid(family), pattern_drafter(family), prompt_of(family), **arguments)
    assert torch.equal(output.sequences, whole[:, : position + 1])
    plain = kit.plain_greedy(hybrid(family), prompt_of(family), return_dict_in_generate=True, **arguments)
    assert difference(kit.cache_of(output), kit.cache_of(plain)) < STATE


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("new_tokens", [1, 2, 5, 13])
def test_returned_cache_is_that_of_plain_decoding_and_continues(family, new_tokens):
    """A returned state that is ahead of its text or behind it, by a length limit inside a block too; and flags that
    make the next forwards other ones."""
    target, prompt = hybrid(family), prompt_of(family)
    output = kit.decode(target, pattern_drafter(family), prompt, new_tokens)
    plain = kit.plain_greedy(target, prompt, new_tokens, return_dict_in_generate=True)
    assert torch.equal(output.sequences, plain.sequences)
    held, expected = kit.cache_of(output), kit.cache_of(plain)
    assert difference(held, expected) < STATE
    for ours, theirs in zip(held.layers, expected.layers, strict=True):
        for name in ("record_past", "has_previous_state", "cumulative_length"):
            assert getattr(ours, name, None) == getattr(theirs, name, None)
        assert vars(ours).keys() == vars(theirs).keys()
    assert vars(held).keys() == vars(expected).keys()
    continued = kit.plain_greedy(target, output.sequences, 9, **{kit.CACHE: held})
    assert torch.equal(continued, text(family, new_tokens + 9))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("only_new", [True, False])
def test_a_filled_cache_is_continued(family, only_new):
    """Mixers that are not found where the first forward has one token; positions counted from the wrong start."""
    target, whole = hybrid(family), text(family)
    first = kit.decode(target, pattern_drafter(family), prompt_of(family), 9)
    held, ids = kit.cache_of(first), whole[:, : LENGTH + 9]
    options = {"attention_mask": torch.ones_like(ids), kit.CACHE: held}
    drafter = follower(kit.NudgedDrafter, family)
    drafter.prompt_lengths = [LENGTH + 9]
    output = kit.decode(target, drafter, ids[:, -1:] if only_new else ids, NEW_TOKENS - 9, **options)
    assert output.sequences[0, 1 if only_new else LENGTH + 9 :].tolist() == whole[0, LENGTH + 9 :].tolist()
    kit.assert_not_vacuous(output.statistics)
    assert kit.cache_of(output) is held


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("place", ["a criterion", "the target", "a mixer that runs again"])
def test_callers_cache_after_an_exception(family, place, monkeypatch):
    """Uncommitted drafts left in the states of a cache that the caller resumes from."""
    target, whole = hybrid(family), text(family)
    cache = DynamicCache(config=target.config.get_text_config())
    calls = []

    def fails(*_, **__):
        calls.append(1)
        if len(calls) == 6:
            raise KeyError("on purpose")
        return torch.tensor([False])

    options = {kit.CACHE: cache}
    if place == "a criterion":
        options["stopping_criteria"] = StoppingCriteriaList([fails])
    elif place == "the target":
        layers = target.get_decoder().layers
        handle = layers[-1].register_forward_pre_hook(lambda *_: bool(fails()) or None)
    else:
        original = RecurrentStates._run_mixers

        def half_way(self, *part):
            original(self, *part)
            fails()

        monkeypatch.setattr(RecurrentStates, "_run_mixers", half_way)
        calls.extend([1] * 3)
    with pytest.raises(KeyError):
        kit.decode(target, pattern_drafter(family), whole[:, :LENGTH], NEW_TOKENS, **options)
    if place == "the target":
        handle.remove()
    held = cache.get_seq_length()
    assert LENGTH <= held < LENGTH + NEW_TOKENS
    again = kit.plain_greedy(target, whole[:, : held + 1], 8, **{kit.CACHE: cache})
    assert torch.equal(again, whole[:, : held + 9])


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("chunk_size", [1, 5])
def test_prompt_in_chunks(family, chunk_size):
    """A state that each chunk of the prompt puts back."""
    output = kit.decode(
        hybrid(family), pattern_drafter(family), prompt_of(family), NEW_TOKENS, prefill_chunk_size=chunk_size
    )
    assert torch.equal(output.sequences, text(family))
    kit.assert_not_vacuous(output.statistics)


@pytest.mark.parametrize("family", ["qwen3_next", "lfm2"])
def test_collected_fields_are_those_of_plain_decoding(family):
    """Rows of the mixers' second run among what a call returns."""
    fields = {"output_scores": True, "output_logits": True, "output_hidden_states": True, "output_attentions": True}
    target = hybrid(family, attention="eager")
    drafter = kit.tiny_drafter(target, 8, drafter_class=kit.PatternDrafter)
    drafter.pattern = PATTERNS[8]
    drafter.follow(text(family), LENGTH)
    output = kit.decode(target, drafter, prompt_of(family), 20, **fields)
    plain = kit.plain_greedy(target, prompt_of(family), 20, return_dict_in_generate=True, **fields)
    for name in ("scores", "logits"):
        torch.testing.assert_close(getattr(output, name), getattr(plain, name), atol=1e-4, rtol=1e-4)
    for name in ("hidden_states", "attentions"):
        for ours, theirs in zip(getattr(output, name), getattr(plain, name), strict=True):
            torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("drafter_class", [kit.PatternDrafter, kit.NudgedDrafter])
def test_batch_is_its_rows_alone(family, drafter_class):
    """Rows that accept differently share one state: a group put back or advanced for another."""
    target = hybrid(family)
    prompts = [kit.prompt_of(length, seed=length) for length in (7, LENGTH, 3)]
    alone = [kit.plain_greedy(target, prompt, NEW_TOKENS + SLACK) for prompt in prompts]
    drafter = kit.tiny_drafter(target, 6, drafter_class=drafter_class)
    drafter.pattern, drafter.offset = [2, 0, 1, 5, 3, 5, 0, 4], 1
    drafter.follow_rows([(row, prompt.shape[1]) for row, prompt in zip(alone, prompts, strict=True)])
    ids, mask = padded(prompts)
    output = kit.decode(target, drafter, ids, NEW_TOKENS, attention_mask=mask)
    kit.assert_not_vacuous(output.statistics)  # of all rows' steps
    if drafter_class is kit.PatternDrafter:
        for statistics in output.statistics.per_row:
            kit.assert_not_vacuous(statistics)
    for row, (whole, prompt) in enumerate(zip(alone, prompts, strict=True)):
        assert output.sequences[row, LENGTH:].tolist() == whole[0, prompt.shape[1] :][:NEW_TOKENS].tolist()


# -- what is refused

REFUSED = {  # before 5.24, fully recurrent targets take no cache of the usual kind
    "jamba": "a block of tokens behind its cache",  # a block forgets the state
    "mamba": "a block of tokens behind its cache|uses none",  # a block's convolution is another one
    "recurrent_gemma": "outside of its modules|keeps a recurrent state",  # its cache holds no states
}


@pytest.mark.parametrize("family", REFUSED)
def test_refused_before_any_forward_with_what_was_measured(family):
    """Targets that disagree with themselves between a block and single tokens."""
    target, calls = hybrid(family, attention="eager"), []
    handle = target.get_decoder().register_forward_pre_hook(lambda *_: calls.append(1))
    with pytest.raises(UnsupportedGenerationError, match=REFUSED[family]):
        kit.decode(target, kit.tiny_drafter(target, 8), kit.prompt_of(5), 4)
    handle.remove()
    assert not calls


@pytest.mark.parametrize("family", ["qwen3_5_text", "zamba2"])
def test_trees_are_refused_by_name(family):
    """A tree whose nodes share one state."""
    with pytest.raises(UnsupportedGenerationError, match="recurrent layers"):
        kit.decode(hybrid(family), pattern_drafter(family), prompt_of(family), 8, tree_budget=6)


def test_fully_recurrent_target():
    """A cache whose length nobody tells: alone, in a batch, returned, and refused where it is filled."""
    target, lengths = hybrid("mamba2", attention="eager"), (7, LENGTH, 3)
    prompts = [kit.prompt_of(length, seed=length) for length in lengths]
    texts = [kit.plain_greedy(target, prompt, NEW_TOKENS + SLACK) for prompt in prompts]
    drafter = kit.tiny_drafter(target, 8, drafter_class=kit.PatternDrafter)
    drafter.pattern = PATTERNS[8]
    drafter.follow(texts[1], LENGTH)
    if kit.CACHE != "cache":  # this transformers gives it no cache of the usual kind
        with pytest.raises(UnsupportedGenerationError, match="uses none"):
            kit.decode(target, drafter, prompts[1], NEW_TOKENS)
        return
    output = kit.decode(target, drafter, prompts[1], NEW_TOKENS)
    assert torch.equal(output.sequences, texts[1][:, : LENGTH + NEW_TOKENS])
    kit.assert_not_vacuous(output.statistics)
    plain = kit.plain_greedy(target, prompts[1], NEW_TOKENS, return_dict_in_generate=True)
    assert difference(kit.cache_of(output), kit.cache_of(plain)) < STATE
    with pytest.raises(UnsupportedGenerationError, match="how many tokens"):
        kit.decode(target, drafter, texts[1], 4, **{kit.CACHE: kit.cache_of(output)})
    drafter.follow_rows(list(zip(texts, lengths, strict=True)))
    ids, mask = padded(prompts)
    batch = kit.decode(target, drafter, ids, NEW_TOKENS, attention_mask=mask)
    for row, (whole, length) in enumerate(zip(texts, lengths, strict=True)):
        assert batch.sequences[row, LENGTH:].tolist() == whole[0, length:][:NEW_TOKENS].tolist()


# -- with images


def test_image_in_the_prompt():
    """An image seen by every block, or positions of the target that drafts count on from another number."""
    target, inputs = multimodal_hybrid(), image_inputs(0)
    length = inputs["input_ids"].shape[1]
    plain = target.generate(**inputs, max_new_tokens=NEW_TOKENS + SLACK, do_sample=False)
    other = target.generate(**image_inputs(1), max_new_tokens=NEW_TOKENS + SLACK, do_sample=False)
    assert not torch.equal(plain, other)
    drafter = kit.tiny_drafter(target, 8, drafter_class=kit.PatternDrafter)
    drafter.pattern = PATTERNS[8]
    drafter.follow(plain, length)
    output = kit.dflow_greedy(target, drafter, **inputs, max_new_tokens=NEW_TOKENS)
    assert torch.equal(output.sequences, plain[:, : length + NEW_TOKENS])
    assert output.statistics.per_step_accepted == kit.scripted_steps(PATTERNS[8], 8, NEW_TOKENS)[0]
    assert drafter.anchor_positions[0] == length  # the drafter's positions count tokens


def test_text_alone_on_a_target_that_sees_images():
    """Text-only prompts refused, or decoded with the positions of an image."""
    target, prompt = multimodal_hybrid(), kit.prompt_of(LENGTH, seed=2)
    prompt[prompt >= IMAGE - 2] = 3
    drafter = kit.scripted(kit.PatternDrafter, target, prompt, NEW_TOKENS, pattern=PATTERNS[8])
    output = kit.decode(target, drafter, prompt, NEW_TOKENS)
    assert torch.equal(output.sequences, kit.plain_greedy(target, prompt, NEW_TOKENS))
    kit.assert_not_vacuous(output.statistics)


# -- sampling, alignment and waits


@pytest.mark.parametrize("rule", ["token", "block"])
def test_law_of_two_steps(monkeypatch, rule):
    """A rejected draft that shifts the law of what follows: every branch of two steps (nightly: with longer blocks)."""
    target = hybrid("lfm2", vocab_size=VOCAB)
    drafter = three_token_drafter(target, 2)
    assert law_error(Loop(monkeypatch, target, drafter, verification=rule), 2, 1) < LAW
    monkeypatch.setattr(RecurrentStates, "advance", _nothing)
    assert law_error(Loop(monkeypatch, target, drafter, verification=rule), 2, 1) > 100 * LAW


@pytest.mark.parametrize("accepted", [0, 2, 4, 5])
@pytest.mark.parametrize("family", ["qwen3_next", "falcon_h1"])
def test_relay_is_aligned_behind_a_rollback(family, accepted):
    """Feedback of rows counted from anywhere but the anchor, in the step behind a rollback and in the next."""
    target = hybrid(family)
    drafter = see_through_drafter(target)
    whole = kit.plain_greedy(target, kit.prompt_of(PROMPT_LENGTH), 40)
    watcher = watch(target, drafter, whole, [accepted, (accepted + 2) % 6, 1])
    assert int(watcher.steps[0][1].accepted_length) == accepted
    wrong, fed = misaligned_slots(target, drafter, watcher)
    assert wrong == 0 and fed >= 5 - accepted


@pytest.mark.parametrize("family", FAMILIES)
def test_features_of_each_token_reach_the_drafter_once(family):
    """Rows of the mixers' second run tapped as well, or a kept row's features left out behind a rollback."""
    target, whole = hybrid(family), text(family)
    drafter = kit.tiny_drafter(target, 8, None, drafter_class=kit.PatternDrafter)
    drafter.pattern = PATTERNS[8]
    drafter.follow(whole, LENGTH)
    recorder = kit.ContextRecorder(drafter)
    kit.decode(target, drafter, prompt_of(family), NEW_TOKENS)
    given = torch.cat(recorder.rows, dim=1)
    output = target(whole, output_hidden_states=True)
    expected = capture_features(output.hidden_states, drafter.config.target_layer_ids)[:, : given.shape[1]]
    assert LENGTH + NEW_TOKENS - 9 <= given.shape[1] < LENGTH + NEW_TOKENS  # those of the last block feed nobody
    assert (given - expected).abs().max() / expected.abs().max() < 1e-3


@pytest.mark.parametrize("options", [{}, {"do_sample": True, "seeds": [3]}, {"stale_mixture": True}])
def test_text_of_other_options(options):
    """Options that touch what a step feeds back or draws: the same text with and without the drafter's mistakes."""
    family = "olmo_hybrid"
    target, prompt = hybrid(family), prompt_of(family)
    output = kit.decode(target, follower(kit.NudgedDrafter, family), prompt, NEW_TOKENS, **options)
    kit.assert_not_vacuous(output.statistics)
    if "do_sample" in options:
        again = kit.decode(target, follower(kit.NudgedDrafter, family), prompt, NEW_TOKENS, **options)
        assert torch.equal(output.sequences, again.sequences)
    else:
        assert torch.equal(output.sequences, text(family))


# -- negative controls: each is seen by the text or by the returned states


def _nothing(self, *_):
    self._calls, self.length = [], 0


def _put_back_only(self, counts):
    self._put_back()
    self._calls, self.length = [], 0


def _off_by(offset: int):
    original = RecurrentStates.advance

    def advance(self, counts):
        original(self, [max(0, min(self.length, count + offset)) if count < self.length else count for count in counts])

    return advance


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "broken",
    [_nothing, _put_back_only, _off_by(-1), _off_by(1)],
    ids=["state not put back", "not advanced", "one token short", "one token too far"],
)
def test_a_wrong_rollback_is_seen(monkeypatch, family, broken):
    """Guards the tests above."""
    check_of(hybrid(family))  # which would see it first
    monkeypatch.setattr(RecurrentStates, "advance", broken)
    output = kit.decode(hybrid(family), pattern_drafter(family), prompt_of(family), NEW_TOKENS)
    plain = kit.plain_greedy(hybrid(family), prompt_of(family), NEW_TOKENS, return_dict_in_generate=True)
    is_seen = difference(kit.cache_of(output), kit.cache_of(plain)) > 100 * STATE
    assert is_seen or not torch.equal(output.sequences, plain.sequences)


@pytest.mark.parametrize("family", FAMILIES)
def test_attention_that_is_not_cropped_is_seen(monkeypatch, family):
    """Guards the tests above: one rejected row stays among the keys, while the states are right."""
    check_of(hybrid(family))
    honest = DynamicLayer.crop
    monkeypatch.setattr(DynamicLayer, "crop", lambda layer, rows: honest(layer, rows + 1) if rows < -1 else None)
    output = kit.decode(hybrid(family), pattern_drafter(family), prompt_of(family), NEW_TOKENS)
    assert not torch.equal(output.sequences, text(family))


def test_features_given_twice_are_refused():
    """Guards the tests above: features of a step that the drafter's cache already holds."""
    held = DraftCache(kit.shared_drafter("llama"))
    features = torch.zeros(1, 3, 2 * kit.HIDDEN_SIZE, dtype=torch.float64)
    held.append_context(features, [0], [3])
    with pytest.raises(ValueError, match="expected 3"):
        held.append_context(features, [0], [3])


@pytest.mark.parametrize("family", ["nemotron_h", "zamba2"])
def test_time_steps_that_stay_clamped_are_seen(monkeypatch, family):
    """Guards the tests above: blocks that clamp time steps, as prompts do, where single tokens do not."""
    check_of(hybrid(family))
    plain = kit.plain_greedy(hybrid(family), prompt_of(family), 13, return_dict_in_generate=True)
    keep_time_steps_clamped(monkeypatch, hybrid(family).config.time_step_min)
    output = kit.decode(hybrid(family), pattern_drafter(family), prompt_of(family), 13)
    assert difference(kit.cache_of(output), kit.cache_of(plain)) > 50 * STATE


def test_a_forward_that_hides_its_mixers_is_no_rollback(monkeypatch):
    """States put back and not advanced where hooks do not fire, as in a module that was compiled without them."""
    family, searching = "qwen3_5_text", RecurrentStates._listening

    @contextlib.contextmanager
    def deaf(self, length, is_recorded):
        with searching(self, length, is_recorded):
            yield
        if is_recorded:
            self._calls = []

    check_of(hybrid(family))
    monkeypatch.setattr(RecurrentStates, "_listening", deaf)
    with pytest.raises(RuntimeError, match="Not all recurrent layers"):
        kit.decode(hybrid(family), pattern_drafter(family), prompt_of(family), NEW_TOKENS)


def test_returned_cache_is_copied_as_any_other():
    """Wrappers left on a cache or its layers, which a copy would share with the first."""
    output = kit.decode(hybrid("qwen3_next"), pattern_drafter("qwen3_next"), prompt_of("qwen3_next"), 9)
    copied = copy.deepcopy(kit.cache_of(output))
    assert difference(copied, kit.cache_of(output)) == 0
