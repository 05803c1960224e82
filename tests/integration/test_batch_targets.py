"""Families of targets: together where rows can keep their own pace, one by one with a warning elsewhere, or refused."""

import kit
import pytest
import torch
from batches import padded

from hf_dflow import UnsupportedGenerationError

NEW_TOKENS = 20
PROMPTS = [kit.prompt_of(length, seed=length) for length in (3, 12, 1)]  # 12 and 20 more cross the window of 8
WIDTH = 12
TOGETHER = ("llama", "qwen3", "gpt2", "mixtral", "qwen3_moe")
ONE_BY_ONE = ("mistral_sliding", "gemma", "gemma_sliding", "phi3")


def target_for(family: str):
    """In float64 where its attention and experts can be: eager float64 makes padding NaN, experts have no float64.

    Phi-3 has a prepare_inputs_for_generation of its own, of which nobody knows what holes do to it.
    """
    if "gemma" in family:
        return kit.tiny_target(family, dtype=torch.float32)
    has_experts = family in ("mixtral", "qwen3_moe")
    return kit.tiny_target(family, attention="sdpa", dtype=torch.float32 if has_experts else torch.float64)


def texts_of(target):
    return [(kit.plain_greedy(target, one, NEW_TOKENS + 8), one.shape[1]) for one in PROMPTS]


def batch(target, drafter, **options):
    ids, mask = padded(PROMPTS)
    return kit.dflow_greedy(target, drafter, ids, attention_mask=mask, max_new_tokens=NEW_TOKENS, **options)


@pytest.mark.parametrize("drafter_class", [kit.PatternDrafter, kit.NudgedDrafter])
@pytest.mark.parametrize("family", TOGETHER + ONE_BY_ONE)
def test_every_family_decodes_batches(family, drafter_class, caplog):
    """Positions, windows, experts or rotary tables that depend on holes, on padding or on the longest row."""
    target = target_for(family)
    drafter = kit.tiny_drafter(target, 8, drafter_class=drafter_class)
    drafter.pattern, drafter.offset = [3, 0, 7, 1, 5], 2 if family in TOGETHER else 0
    texts = texts_of(target)
    output = batch(target, drafter.follow_rows(texts))
    for row, (text, length) in enumerate(texts):
        assert output.sequences[row, WIDTH:].tolist() == text[0, length : length + NEW_TOKENS].tolist()
    kit.assert_not_vacuous(output.statistics)
    row_by_row = [record for record in caplog.records if "row by row" in record.getMessage()]
    assert len(row_by_row) == (family in ONE_BY_ONE)
    forwards = [row.num_target_forwards for row in output.statistics.per_row]
    assert output.statistics.num_target_forwards == (max(forwards) if family in TOGETHER else sum(forwards))


def test_rows_one_by_one_share_nothing_but_the_call(caplog):
    """Row by row: seeds that start anew for each row, records that are not put together, one warning a row."""
    target = target_for("mistral_sliding")
    ids, mask = padded(PROMPTS)
    options = {
        "attention_mask": mask,
        "max_new_tokens": NEW_TOKENS,
        "output_scores": True,
        "output_hidden_states": True,
    }
    plain = kit.plain_greedy(target, ids, return_dict_in_generate=True, **options)
    output = kit.dflow_greedy(target, kit.tiny_drafter(target), ids, **options)
    assert torch.equal(output.sequences, plain.sequences)
    for ours, theirs in zip(output.scores, plain.scores, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
    for ours, theirs in zip(output.hidden_states[1:], plain.hidden_states[1:], strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
    torch.manual_seed(0)
    sampled = target.generate(
        kit.prompt_of(5), assistant_model=kit.tiny_drafter(target), speculation_type="dflow", do_sample=True,
        num_return_sequences=3, max_new_tokens=8, temperature=2.0,
    )  # fmt: skip
    assert len({tuple(row) for row in sampled.tolist()}) == 3


def test_a_filled_cache_of_a_batch_that_goes_one_by_one_is_refused():
    """A prefix that is forgotten, which changes the text."""
    target = target_for("mistral_sliding")
    held = target(torch.cat([kit.prompt_of(4)] * 2), use_cache=True)
    name = next(name for name in ("cache", "past_key_values") if name in held)
    with pytest.raises(UnsupportedGenerationError, match="row by row"):
        target.generate(
            torch.cat([kit.prompt_of(9)] * 2), assistant_model=kit.tiny_drafter(target), speculation_type="dflow",
            max_new_tokens=4, **{name: held[name]},
        )  # fmt: skip


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_rotary_tables_that_change_with_the_length(kind):
    """A block computed with the table of its last, perhaps rejected, position: text that plain decoding never says."""
    rope = {"rope_type": kind, "factor": 2.0, "rope_theta": 1e4}
    if kind == "longrope":
        rope |= {"short_factor": [1.0] * 4, "long_factor": [3.0] * 4, "original_max_position_embeddings": 16}
    positions = 16 if kind == "dynamic" else 32
    target = kit.tiny_target(rope_parameters=rope, max_position_embeddings=positions)
    drafter, prompt = kit.tiny_drafter(target, 4), kit.prompt_of(5)
    with pytest.raises(UnsupportedGenerationError, match="at most 16"):
        kit.dflow_greedy(target, drafter, prompt, max_length=17)
    text = kit.plain_greedy(target, prompt, 11)
    assert torch.equal(kit.dflow_greedy(target, drafter, prompt, max_length=16).sequences, text)


def test_quantised_head():
    """C8 in a batch: code that reads a weight matrix of the head."""
    target = target_for("llama")
    target.lm_head = kit.FakeQuantized(target.lm_head)
    texts = texts_of(target)
    drafter = kit.tiny_drafter(target, 8, drafter_class=kit.NudgedDrafter).follow_rows(texts)
    output = batch(target, drafter)
    for row, (text, length) in enumerate(texts):
        assert output.sequences[row, WIDTH:].tolist() == text[0, length : length + NEW_TOKENS].tolist()
    kit.assert_not_vacuous(output.statistics)


@pytest.mark.parametrize("batch_size", [1, 3])
def test_peft_wrapped_target(batch_size):
    """I3: the base model's text instead of the adapted one's, also after adapters are switched; a drafter that gets the
    adapter."""
    peft = pytest.importorskip("peft")
    base = target_for("llama")
    plain_base = [kit.plain_greedy(base, one, NEW_TOKENS)[0, one.shape[1] :].tolist() for one in PROMPTS]
    drafter = kit.tiny_drafter(base, 8, drafter_class=kit.NudgedDrafter)
    config = peft.LoraConfig(r=4, lora_alpha=32, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    with torch.random.fork_rng():
        torch.manual_seed(1)
        target = peft.get_peft_model(base, config).double().eval()
    ids, mask = padded(PROMPTS[:batch_size])
    width = ids.shape[1]

    def both():
        texts = []
        for one in PROMPTS[:batch_size]:
            text = target.generate(input_ids=one, max_new_tokens=NEW_TOKENS + 8, do_sample=False)
            texts.append((text, one.shape[1]))
        output = target.generate(
            input_ids=ids, attention_mask=mask, assistant_model=drafter.follow_rows(texts), do_sample=False,
            speculation_type="dflow", max_new_tokens=NEW_TOKENS, return_dict_in_generate=True,
        )  # fmt: skip
        for row, (text, length) in enumerate(texts):
            assert output.sequences[row, width:].tolist() == text[0, length : length + NEW_TOKENS].tolist()
        kit.assert_not_vacuous(output.statistics)
        return [text[0, length : length + NEW_TOKENS].tolist() for text, length in texts]

    assert both() != plain_base[:batch_size]
    with target.disable_adapter():
        assert both() == plain_base[:batch_size]
    assert both() != plain_base[:batch_size]
    assert not any("lora" in name for name, _ in drafter.named_modules())


def test_prompt_tuning_is_refused():
    """Virtual tokens that no position of ours counts."""
    peft = pytest.importorskip("peft")
    base, calls = target_for("llama"), []
    drafter = kit.tiny_drafter(base)
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    target = peft.get_peft_model(base, config).double().eval()
    base.model.register_forward_pre_hook(lambda *_: calls.append(1))
    with pytest.raises(UnsupportedGenerationError, match="prompt tuning"):
        target.generate(
            input_ids=kit.prompt_of(5),
            assistant_model=drafter,
            speculation_type="dflow",
            max_new_tokens=4,
            do_sample=False,
        )
    assert not calls


@pytest.mark.skipif(not torch.cuda.is_available(), reason="flash attention needs a GPU")
def test_flash_attention():
    """Holes that flash attention does not unpad, or attends to."""
    pytest.importorskip("flash_attn")
    texts = {}
    for attention in ("sdpa", "flash_attention_2"):
        target = kit.tiny_target("llama", attention=attention, dtype=torch.bfloat16).cuda()
        drafter = kit.tiny_drafter(target, 8, drafter_class=kit.PatternDrafter).cuda()
        drafter.pattern, drafter.offset = [3, 0, 7, 1, 5], 2
        ids, mask = (part.cuda() for part in padded(PROMPTS))
        alone = [(kit.plain_greedy(target, one.cuda(), NEW_TOKENS + 8), one.shape[1]) for one in PROMPTS]
        output = kit.dflow_greedy(
            target, drafter.follow_rows(alone), ids, attention_mask=mask, max_new_tokens=NEW_TOKENS, output_logits=True
        )
        texts[attention] = torch.stack(output.logits[:4])
    torch.testing.assert_close(texts["sdpa"], texts["flash_attention_2"], atol=0.1, rtol=0.1)
