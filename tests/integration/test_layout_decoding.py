"""Decoding with a drafter of each layout: windows, tapped layers, heads, vocabularies, relays (C6 to C8, F6)."""

import pytest
import torch
from kit import (
    ContextRecorder,
    FakeQuantized,
    assert_not_vacuous,
    assert_weights,
    dflow_greedy,
    plain_greedy,
    prompt_of,
    tiny_target,
    weights_of,
)
from layouts import BLOCK_SIZE, KINDS, MASK_TOKEN_ID, learned, original, taps_of, write
from speculators_oracle import DRAFT_VOCAB

from hf_dflow import AcceptanceProcessor, DFlowDrafter
from hf_dflow.reference import draft_block, reference_generate

CONTEXT, PROMPT_LENGTH, NEW_TOKENS = 30, 16, 32  # contexts well past the window of 8
ROUNDING = 1e-5  # relative, float32 norms of transformers
SCALES = {"input_embedding_scale": 3.0, "output_multiplier": 0.4, "final_logit_softcapping": 2.5}
SELECTING = ("dflash2", "speculators2")


class DraftRecorder(AcceptanceProcessor):
    """Keeps every draft block."""

    def __init__(self):
        self.blocks = []

    def __deepcopy__(self, memo):
        return self

    def observe(self, draft, verification):
        if draft.token_ids.numel():
            self.blocks.append(draft)


def recorded(drafter: DFlowDrafter) -> DraftRecorder:
    recorder = DraftRecorder()
    drafter.config.generation_defaults = {"acceptance_processors": [recorder]}
    return recorder


@pytest.fixture(scope="module", params=KINDS)
def decoded(request, tmp_path_factory):
    """A drafter with sliding and full layers that knows most of the text, what the loop fed it, and its output."""
    target, prompt = tiny_target(), prompt_of(PROMPT_LENGTH)
    folder = tmp_path_factory.mktemp("decoded")
    write(request.param, folder, target)
    text = plain_greedy(target, prompt, NEW_TOKENS + BLOCK_SIZE)
    drafter = learned(folder, target, text, PROMPT_LENGTH)
    before, recorder = weights_of(target), ContextRecorder(drafter)
    output = dflow_greedy(target, drafter, prompt, max_new_tokens=NEW_TOKENS)
    del drafter.project_context
    assert_weights(target, before)
    assert torch.equal(output.sequences, text[:, : PROMPT_LENGTH + NEW_TOKENS])
    assert_not_vacuous(output.statistics)
    return request.param, folder, target, drafter, recorder.rows, output


def test_past_the_window_the_loop_is_the_reference(decoded):
    """C6: sliding layers that run as full ones, or see too far, once the context is longer than the window."""
    _, _, target, drafter, _, output = decoded
    prompt_ids = prompt_of(PROMPT_LENGTH)[0].tolist()
    expected = reference_generate(target, drafter, prompt_ids, NEW_TOKENS, use_relay=False)
    assert output.sequences[0].tolist() == expected.token_ids
    assert output.statistics.per_step_accepted == expected.accepted_lengths
    drafter.config.layer_types = ["full_attention"] * 2
    without_window = reference_generate(target, drafter, prompt_ids, NEW_TOKENS, use_relay=False)
    drafter.config.layer_types = ["sliding_attention", "full_attention"]
    assert without_window.accepted_lengths != expected.accepted_lengths, "the window matters here"


def test_the_loop_feeds_the_states_that_the_file_names(decoded):
    """C7: layers counted from another end, from 0 or from 1, which costs acceptance and shows nowhere else."""
    kind, folder, target, _, rows, output = decoded
    states = target(output.sequences, output_hidden_states=True, use_cache=False).hidden_states
    fed = torch.cat(rows, dim=1)
    expected = torch.cat([states[i] for i in taps_of(kind, folder)], dim=-1)[:, : fed.shape[1]]
    assert fed.shape[1] > PROMPT_LENGTH + NEW_TOKENS // 2
    assert (fed - expected).abs().max() < ROUNDING * expected.abs().max()
    assert not torch.allclose(states[1], states[2]), "neighbours differ"


@pytest.mark.parametrize("kind", KINDS)
def test_a_drafter_in_half_the_targets_width(kind):
    """F3: a text that depends on the drafter's number format."""
    target = tiny_target(dtype=torch.float32)
    drafter = DFlowDrafter.from_pretrained(original(kind), dtype=torch.bfloat16)
    text = dflow_greedy(target, drafter, prompt_of(9), max_new_tokens=12).sequences
    assert torch.equal(text, plain_greedy(target, prompt_of(9), 12))


# -- embedding and head


SHARING = {
    "tied": ("qwen3", {}),
    "scaled and soft-capped by the target": ("gemma", {}),
    "scaled and soft-capped by the drafter": ("llama", {"draft_config": SCALES}),
    "own embedding": ("llama", {"own_embedding": True}),
    "own reduced head": ("llama", {"draft_vocab_size": len(DRAFT_VOCAB)}),
    "head of which only forward can be used": ("llama", {}),
}
ONLY = {
    "draft_config": ("dflash", "dflash2"),
    "own_embedding": ("speculators", "speculators2"),
    "draft_vocab_size": ("speculators",),
}
CASES = [
    (kind, name) for kind in KINDS for name, (_, fields) in SHARING.items() if all(kind in ONLY[key] for key in fields)
]


@pytest.mark.parametrize("kind, name", CASES)
@torch.no_grad()
def test_logits_are_what_the_format_says(kind, name, tmp_path):
    """C8: a scale or a cap of the target's that the format does not apply, or one that it does; a head shared although
    the file holds another; a write into the target."""
    family, fields = SHARING[name]
    target, prompt = tiny_target(family), prompt_of(CONTEXT)
    write(kind, tmp_path, target, **fields)
    drafter = DFlowDrafter.from_pretrained(tmp_path, attn_implementation="eager", dtype=torch.float64)
    head = target.get_output_embeddings()
    text = plain_greedy(target, prompt, 12)
    tokens = text[0, : CONTEXT + 1].tolist()
    if name == "head of which only forward can be used":
        target.lm_head = FakeQuantized(target.lm_head)
    before, recorder = weights_of(target), recorded(drafter)
    output = dflow_greedy(target, drafter, prompt, max_new_tokens=12)
    assert torch.equal(output.sequences, text)
    assert_weights(target, before)

    # Written out: what the drafter reads, what turns its states into logits.
    table = target.get_input_embeddings()
    own = table if kind == "transformers" else drafter.embed_tokens
    rows = own or (lambda ids: table.weight[ids])
    scale = SCALES["input_embedding_scale"] if fields.get("draft_config") else 1.0
    block = torch.tensor([tokens[-1:] + [MASK_TOKEN_ID] * (BLOCK_SIZE - 1)])
    states = target(prompt, output_hidden_states=True).hidden_states
    features = torch.cat([states[i] for i in taps_of(kind, tmp_path)], dim=-1)
    hidden = drafter(rows(block) * scale, features).last_hidden_state[0, 1:]
    assert torch.allclose(hidden, draft_block(target, drafter, tokens, None), rtol=ROUNDING, atol=ROUNDING)
    weight = head.weight if drafter.lm_head is None else drafter.lm_head.weight
    expected = hidden @ weight.T
    if fields.get("draft_config"):
        expected = 2.5 * torch.tanh(expected * 0.4 / 2.5)
    if "draft_vocab_size" in fields:
        in_target = torch.full((len(hidden), 64), -torch.inf, dtype=torch.float64)
        in_target[:, DRAFT_VOCAB] = expected
        expected = in_target
    expected[:, MASK_TOKEN_ID] = -torch.inf
    found = recorder.blocks[0].logits[0].to(expected)
    if kind in SELECTING:  # it draws from a few candidates, chosen by these logits
        chosen = found.isfinite()
        assert torch.equal(chosen, torch.zeros_like(chosen).scatter(1, expected.topk(5).indices, True))
    else:
        assert torch.allclose(found, expected, rtol=ROUNDING, atol=ROUNDING)
    assert expected[expected.isfinite()].std() > 0.1


@pytest.mark.parametrize("kind", SELECTING)
def test_the_sparse_distribution_is_the_one_that_is_verified(kind):
    """Bug: drafts picked from a few candidates but verified with probabilities of all tokens: not the target's law."""
    drafter = DFlowDrafter.from_pretrained(original(kind)).double()
    recorder = recorded(drafter)
    options = {"do_sample": True, "temperature": 1.3, "top_k": 0, "max_new_tokens": 24}
    tiny_target().generate(prompt_of(9), assistant_model=drafter, speculation_type="dflow", **options)
    assert len(recorder.blocks) > 3
    for block in recorder.blocks:
        allowed = block.logits.isfinite()
        assert (allowed.sum(-1) <= 5).all() and (allowed.sum(-1) >= 2).all()
        assert allowed.gather(-1, block.token_ids[..., None]).all()


# -- vocabularies of other sizes


@pytest.mark.parametrize("kind", KINDS)
def test_a_target_with_more_rows_than_the_drafter_knows(kind, tmp_path):
    """F6: an error for two paddings of one vocabulary, a padded id proposed, or a token that is never reached."""
    target, prompt = tiny_target(vocab_size=72, seed=3), prompt_of(PROMPT_LENGTH)
    smaller = tiny_target(seed=3)
    with torch.no_grad():
        smaller.lm_head.weight.copy_(target.lm_head.weight[:64])
        smaller.get_input_embeddings().weight.copy_(target.get_input_embeddings().weight[:64])
    write(kind, tmp_path, smaller)
    text = plain_greedy(target, prompt, NEW_TOKENS + BLOCK_SIZE)
    assert int(text.max()) >= 64 and int((text[0] < 64).sum()) > PROMPT_LENGTH + NEW_TOKENS // 2
    known = {"vocab_size": 64} if kind == "transformers" else {}  # its file does not give the vocabulary
    drafter = learned(tmp_path, target, text, PROMPT_LENGTH, **known)
    recorder = recorded(drafter)
    output = dflow_greedy(target, drafter, prompt, max_new_tokens=NEW_TOKENS)
    assert torch.equal(output.sequences, text[:, : PROMPT_LENGTH + NEW_TOKENS])
    assert_not_vacuous(output.statistics)
    for block in recorder.blocks:
        assert (block.token_ids < MASK_TOKEN_ID).all() and not block.logits[..., 64:].isfinite().any()


# -- a relay on top


FROM_ANCHOR = {"sample_from_anchor": True}
ON_TOP = [("dflash", {}), ("dflash2", {}), ("speculators", {}), ("speculators", FROM_ANCHOR),
          ("speculators2", FROM_ANCHOR), ("transformers", {})]  # fmt: skip


@pytest.mark.parametrize(("kind", "fields"), ON_TOP, ids=str)
def test_a_relay_on_top_in_a_batch_and_saved(kind, fields, tmp_path):
    """Bug: a relay that a converted drafter takes and never applies, that changes the text, or is lost in saving; rows
    of a batch that select by each other's tokens."""
    target, prompt = tiny_target(), prompt_of(PROMPT_LENGTH)
    write(kind, tmp_path / "theirs", target, **fields)
    text = plain_greedy(target, prompt, NEW_TOKENS + BLOCK_SIZE + 1)
    drafter = learned(tmp_path / "theirs", target, text, PROMPT_LENGTH, use_relay=True)
    untrained = dflow_greedy(target, drafter, prompt, max_new_tokens=NEW_TOKENS).statistics.per_step_accepted
    generator = torch.Generator().manual_seed(3)
    for layer, size in ((drafter.relay.up_proj, 0.04), (drafter.relay.down_proj, 0.3)):
        layer.weight.data.copy_(torch.randn(layer.weight.shape, generator=generator) * size)
    drafter.save_pretrained(tmp_path / "ours")
    drafter = DFlowDrafter.from_pretrained(tmp_path / "ours", dtype=torch.float64)
    prompts = torch.cat([prompt, prompt_of(PROMPT_LENGTH, 1), prompt.flip(1)])
    together = dflow_greedy(target, drafter, prompts, max_new_tokens=NEW_TOKENS)
    for i, row in enumerate(prompts):
        alone = dflow_greedy(target, drafter, row[None], max_new_tokens=NEW_TOKENS)
        assert torch.equal(together.sequences[i], alone.sequences[0])
        assert together.statistics.per_row[i].per_step_accepted == alone.statistics.per_step_accepted
    relayed = together.statistics.per_row[0]
    assert torch.equal(together.sequences[:1], text[:, : PROMPT_LENGTH + NEW_TOKENS])
    assert_not_vacuous(relayed)
    assert relayed.per_step_accepted != untrained
    options = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "drafter": drafter, "trust_remote_code": True}
    published = target.generate(prompt, custom_generate=str(tmp_path / "ours"), **options)
    assert torch.equal(published, text[:, : PROMPT_LENGTH + NEW_TOKENS])
    drafter.config.generation_defaults = {"use_relay": False}
    without = dflow_greedy(target, drafter, prompt, max_new_tokens=NEW_TOKENS)
    assert without.statistics.per_step_accepted == untrained
