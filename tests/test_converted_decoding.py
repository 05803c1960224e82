"""Decoding with each published layout: windows, tapped layers, heads, vocabularies (SCENARIOS.md C6 to C8, F6)."""

import pytest
import torch
from converted import BLOCK_SIZE, KINDS, MASK_TOKEN_ID, REACH, learned, taps_of, write
from kit import assert_not_vacuous, dflow_greedy, plain_greedy, prompt_of, tiny_target
from speculators_oracle import DRAFT_VOCAB
from test_dflash2_format import LawRecorder
from test_pairing import ContextRecorder, FakeQuantized, _assert_untouched, _checksum

from hf_dflow import DFlowDrafter
from hf_dflow.reference import draft_block, reference_generate

CONTEXT, PROMPT_LENGTH, NEW_TOKENS = 30, 16, 32  # contexts well past the window of 8
ROUNDING = 1e-5  # relative, float32 norms of transformers
SCALES = {"input_embedding_scale": 3.0, "output_multiplier": 0.4, "final_logit_softcapping": 2.5}
# -- the whole way: window, tapped states, losslessness


@pytest.fixture(scope="module", params=KINDS)
def decoded(request, tmp_path_factory):
    """A drafter with sliding and full layers that knows most of the text, what the loop fed it, and its output."""
    target, prompt = tiny_target(), prompt_of(PROMPT_LENGTH)
    folder = tmp_path_factory.mktemp("decoded")
    write(request.param, folder, target)
    text = plain_greedy(target, prompt, NEW_TOKENS + BLOCK_SIZE)
    drafter = learned(request.param, folder, target, text, PROMPT_LENGTH)
    before, recorder = _checksum(target), ContextRecorder(drafter)
    output = dflow_greedy(target, drafter, prompt, max_new_tokens=NEW_TOKENS)
    del drafter.project_context
    _assert_untouched(target, before)
    assert torch.equal(output.sequences, text[:, : PROMPT_LENGTH + NEW_TOKENS])
    assert_not_vacuous(output.statistics)
    return request.param, folder, target, drafter, recorder.rows, output


def test_past_the_window_the_loop_is_the_reference(decoded):
    """C6: sliding layers that run as full ones, or see too far, once the context is longer than the window."""
    _, _, target, drafter, _, output = decoded
    expected = reference_generate(target, drafter, prompt_of(PROMPT_LENGTH)[0].tolist(), NEW_TOKENS, use_relay=False)
    assert output.sequences[0].tolist() == expected.token_ids
    assert output.statistics.per_step_accepted == expected.accepted_lengths
    drafter.config.layer_types = ["full_attention"] * 2
    other = reference_generate(target, drafter, prompt_of(PROMPT_LENGTH)[0].tolist(), NEW_TOKENS, use_relay=False)
    drafter.config.layer_types = ["sliding_attention", "full_attention"]
    assert other.accepted_lengths != expected.accepted_lengths, "the window matters here"


def test_the_loop_feeds_the_states_that_the_file_names(decoded):
    """C7: layers counted from another end, from 0 or from 1, which costs acceptance and shows nowhere else."""
    kind, folder, target, _, rows, output = decoded
    whole = target(output.sequences, output_hidden_states=True, use_cache=False).hidden_states
    fed = torch.cat(rows, dim=1)
    expected = torch.cat([whole[i] for i in taps_of(kind, folder)], dim=-1)[:, : fed.shape[1]]
    assert fed.shape[1] > PROMPT_LENGTH + NEW_TOKENS // 2
    assert (fed - expected).abs().max() < ROUNDING * expected.abs().max()
    assert not torch.allclose(whole[1], whole[2]), "neighbours differ"


# -- the edge of the window


@pytest.mark.parametrize("layers", ["sliding", "mixed"])
@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_the_window_ends_where_the_format_says(kind, layers, tmp_path):
    """C6: a window of one more or one less; for layers that all slide nothing beyond it may matter."""
    target = tiny_target(dtype=torch.float32)
    write(kind, tmp_path, target, layers)
    drafter = DFlowDrafter.from_pretrained(tmp_path, attn_implementation="eager")
    block = torch.tensor([[5] + [MASK_TOKEN_ID] * (BLOCK_SIZE - 1)])
    embeds = drafter.embed(block, target.get_input_embeddings())
    features = torch.randn(1, CONTEXT, drafter.fc.in_features, generator=torch.Generator().manual_seed(2))

    def logits(changed: int | None = None):
        context = features.clone()
        if changed is not None:
            context[:, : changed + 1] += 3.0
        return drafter.compute_logits(drafter(embeds, context).last_hidden_state, target.get_output_embeddings())

    last = CONTEXT - REACH[kind]  # the anchor sits at CONTEXT and sees farthest back
    assert torch.equal(logits(last - 1), logits()) == (layers == "sliding")
    assert (logits(last) - logits(last - 1))[:, 0].abs().max() > 1e-4


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
    before, recorder = _checksum(target), LawRecorder()
    drafter.config.generation_defaults = {"acceptance_processors": [recorder]}
    output = dflow_greedy(target, drafter, prompt, max_new_tokens=12)
    assert torch.equal(output.sequences, text)
    _assert_untouched(target, before)

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
        everything = torch.full((len(hidden), 64), -torch.inf, dtype=torch.float64)
        everything[:, DRAFT_VOCAB] = expected
        expected = everything
    expected[:, MASK_TOKEN_ID] = -torch.inf
    laws = next(draft.logits[0] for draft in recorder.blocks if draft.token_ids.numel()).to(expected)
    if kind in ("dflash2", "speculators2"):  # it draws from a few candidates, chosen by these logits
        chosen = laws.isfinite()
        assert torch.equal(chosen, torch.zeros_like(chosen).scatter(1, expected.topk(5).indices, True))
    else:
        assert torch.allclose(laws, expected, rtol=ROUNDING, atol=ROUNDING)
    assert expected[expected.isfinite()].std() > 0.1


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
    known = {"vocab_size": 64} if kind == "transformers" else {}  # whose file says nothing of the vocabulary
    drafter, recorder = learned(kind, tmp_path, target, text, PROMPT_LENGTH, **known), LawRecorder()
    drafter.config.generation_defaults = {"acceptance_processors": [recorder]}
    output = dflow_greedy(target, drafter, prompt, max_new_tokens=NEW_TOKENS)
    assert torch.equal(output.sequences, text[:, : PROMPT_LENGTH + NEW_TOKENS])
    assert_not_vacuous(output.statistics)
    for draft in recorder.blocks:
        assert (draft.token_ids < MASK_TOKEN_ID).all() and not draft.logits[..., 64:].isfinite().any()
