"""The edges of target and drafter: positions, windows, number formats."""

import logging

import kit
import pytest
import torch

from hf_dflow import DFlowDrafter
from hf_dflow.errors import DrafterConfigError

PROMPT = kit.prompt_of(20)
PATTERN = [3, 0, 7, 1, 5]
FLOAT32 = 1e-5  # norms and eager softmax run in float32 inside a float64 model
NEAR_TIE = 0.1  # a low-precision target may choose either of two tokens whose logits are this close
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


# -- positions


@pytest.mark.parametrize("drafter_class", [kit.OracleDrafter, kit.PatternDrafter])
def test_target_with_few_learned_positions(drafter_class, caplog):
    """A draft at a position that the target has no embedding for: an index error, or the last steps refused."""
    target = kit.tiny_target("gpt2", n_positions=32)
    text = kit.plain_greedy(target, PROMPT, 12)
    drafter = kit.tiny_drafter(target, 16, drafter_class=drafter_class)
    drafter.pattern = [2, 4]
    drafter.follow(text, PROMPT.shape[1])
    output = kit.dflow_greedy(target, drafter, PROMPT, max_length=32)
    assert torch.equal(output.sequences, text)
    assert output.sequences.shape[1] == 32
    assert max(output.statistics.per_step_accepted) >= 2
    if drafter_class is kit.PatternDrafter:
        kit.assert_not_vacuous(output.statistics)
    assert kit.our_warnings(caplog) == []


@pytest.mark.parametrize("family", ["llama", "gpt2", "mistral_sliding"])
def test_drafter_with_fewer_positions_than_the_target(family, caplog):
    """Drafting at positions that the drafter never saw in training; a warning each step; a wrong or shorter text."""
    limit, block_size, prompt = 24, 4, kit.prompt_of(8)
    target = kit.shared_target(family)
    drafter = kit.scripted(
        kit.PatternDrafter, target, prompt, 40, block_size=block_size, pattern=[2, 3, 0], max_position_embeddings=limit
    )
    output = kit.dflow_greedy(target, drafter, prompt, max_new_tokens=40)
    assert torch.equal(output.sequences, kit.plain_greedy(target, prompt, 40))
    kit.assert_not_vacuous(output.statistics)
    assert max(drafter.anchor_positions) <= limit - block_size
    assert max(drafter.anchor_positions) > limit - 2 * block_size
    (warning,) = kit.our_warnings(caplog)
    assert "max_position_embeddings of 24" in warning


def test_prompt_beyond_the_drafters_positions(caplog, target):
    """A prompt that leaves no room at all: drafted once before anyone looks."""
    drafter = kit.scripted(kit.OracleDrafter, target, PROMPT, 12, max_position_embeddings=16)
    output = kit.dflow_greedy(target, drafter, PROMPT, max_new_tokens=12)
    assert torch.equal(output.sequences, kit.plain_greedy(target, PROMPT, 12))
    assert drafter.anchor_positions == [] and output.statistics.num_spec_steps == 0
    assert len(kit.our_warnings(caplog)) == 1


# -- windows


class ObservedDrafter(kit.PatternDrafter):
    """Keeps each forward's input embeddings, positions and real logits."""

    def draft_hidden(self, block_embeds, position_ids, extend, mask_for):
        self.observed.append([block_embeds, position_ids[0]])
        return super().draft_hidden(block_embeds, position_ids, extend, mask_for)

    def compute_logits(self, hidden, target_head):
        self.observed[-1].append(DFlowDrafter.compute_logits(self, hidden[..., :-4], target_head).clone())
        return super().compute_logits(hidden, target_head)


def rotate(states, positions, theta=10000.0):
    """Rotary positions by definition: pairs (i, i + D/2) turned by position * theta^(-2i/D); `[heads, T, D]`."""
    half = states.shape[-1] // 2
    angles = positions[:, None] * theta ** (-torch.arange(half, dtype=states.dtype) / half)
    first, second = states[..., :half], states[..., half:]
    return torch.cat(
        [first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()], dim=-1
    )


def reference_logits(drafter, target, text, block_embeds, positions):
    """Logits of one block by the formulas: the whole context in every layer, one mask, no cache."""
    config = drafter.config
    anchor = int(positions[0])
    states = target(text[:, :anchor], output_hidden_states=True).hidden_states
    context = drafter.hidden_norm(drafter.fc(torch.cat([states[i + 1] for i in config.target_layer_ids], dim=-1)))[0]
    hidden = block_embeds[0]
    key_positions = torch.arange(anchor + len(hidden))
    distance = positions[:, None] - key_positions[None, :]
    groups = config.num_attention_heads // config.num_key_value_heads

    def heads(projection, norm, rows):
        split = projection(rows).view(len(rows), -1, config.head_dim)
        return (split if norm is None else norm(split)).transpose(0, 1)

    for layer, kind in zip(drafter.layers, config.layer_types, strict=True):
        attention, block = layer.self_attn, layer.input_layernorm(hidden)
        rows = torch.cat([context, block])
        queries = rotate(heads(attention.q_proj, attention.q_norm, block), positions)
        keys = rotate(heads(attention.k_proj, attention.k_norm, rows), key_positions).repeat_interleave(groups, 0)
        values = heads(attention.v_proj, None, rows).repeat_interleave(groups, 0)
        scores = queries @ keys.transpose(1, 2) / config.head_dim**0.5
        if kind == "sliding_attention":
            reach = config.sliding_window if config.window_is_inclusive else config.sliding_window - 1
            hides = distance.abs() > reach
            if config.sliding_is_causal:
                hides |= distance < 0
            scores = scores.masked_fill(hides, -torch.inf)
        mixed = (scores.softmax(dim=-1) @ values).transpose(0, 1).flatten(1)
        hidden = hidden + attention.o_proj(mixed)
        hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
    return target.get_output_embeddings()(drafter.norm(hidden))[1:]


LAYERS = {
    "mixed": ["full_attention", "sliding_attention", "full_attention", "sliding_attention"],
    "sliding": ["sliding_attention"] * 2,
    "full": ["full_attention"] * 2,
}


@pytest.mark.parametrize(
    ("layers", "family", "is_inclusive"),
    [("full", "gpt2", True)]
    + [(layers, family, edge) for layers in ("mixed", "sliding") for family in ("gpt2", "gemma_sliding")
       for edge in (True, False)],
)  # fmt: skip
def test_cached_loop_is_the_masked_reference(layers, family, is_inclusive):
    """A window applied to the wrong layers, off by one, or measured in the cut cache instead of in the text."""
    target, prompt = kit.shared_target(family), kit.prompt_of(30)
    text = kit.plain_greedy(target, prompt, 50)
    drafter = kit.tiny_drafter(
        target,
        drafter_class=ObservedDrafter,
        num_hidden_layers=len(LAYERS[layers]),
        layer_types=LAYERS[layers],
        sliding_window=kit.WINDOW,
        window_is_inclusive=is_inclusive,
        sliding_is_causal=not is_inclusive,
    ).follow(text, prompt.shape[1])
    drafter.pattern, drafter.observed = PATTERN, []
    output = kit.dflow_greedy(target, drafter, prompt, max_new_tokens=42)
    kit.assert_not_vacuous(output.statistics)
    assert len(drafter.observed) == output.statistics.num_spec_steps > 6
    for block_embeds, positions, logits in drafter.observed:
        expected = reference_logits(drafter, target, text, block_embeds, positions)
        torch.testing.assert_close(logits[0], expected[: logits.shape[1]], atol=FLOAT32, rtol=FLOAT32)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"layer_types": None}, "'layer_types' is missing"),
        ({"layer_types": ["full_attention", "linear_attention"]}, "linear_attention"),
        ({"layer_types": ["full_attention"]}, "1 entries for 2 layers"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "'sliding_window' is missing"),
    ],
)
def test_layer_types_are_never_guessed(change, words):
    """Full attention where the configuration does not say what a layer is."""
    with pytest.raises(DrafterConfigError, match=words):
        kit.tiny_drafter(kit.shared_target(), **change)


# -- number formats


@pytest.mark.parametrize("drafter_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("target_dtype", DTYPES, ids=str)
def test_every_pair_of_number_formats(target_dtype, drafter_dtype, caplog):
    """Features, embeddings or logits that meet weights of another format."""
    target = kit.shared_target(dtype=target_dtype)
    drafter = kit.scripted(kit.PatternDrafter, target, PROMPT, 30, pattern=PATTERN, dtype=drafter_dtype)
    output = kit.dflow_greedy(target, drafter, PROMPT, max_new_tokens=30)
    ours, plain = output.sequences[0], kit.plain_greedy(target, PROMPT, 30)[0]
    kit.assert_not_vacuous(output.statistics)
    assert len(ours) == len(plain) and kit.our_warnings(caplog) == []
    assert target_dtype != torch.float32 or torch.equal(ours, plain)
    differs = (ours != plain).nonzero().flatten()
    if len(differs):  # a block and a single token round differently; only a near tie may tip over
        at = int(differs[0])
        logits = target(ours[None, :at]).logits[0, -1].float()
        assert (logits[ours[at]] - logits[plain[at]]).abs() <= NEAR_TIE


@pytest.mark.parametrize("do_sample", [False, True])
def test_drafter_that_overflows(do_sample, caplog):
    """NaN drafts accepted, drawn from, or drafted for ever; a warning each step."""
    caplog.set_level(logging.WARNING)
    target = kit.shared_target(dtype=torch.float32)
    drafter = kit.tiny_drafter(target, dtype=torch.float16)
    for layer in drafter.layers:
        layer.mlp.down_proj.weight.mul_(1e5)
    kwargs = {"max_new_tokens": 24, "return_dict_in_generate": True, "do_sample": do_sample, "top_k": 0}
    output = target.generate(PROMPT, assistant_model=drafter, speculation_type="dflow", **kwargs)
    assert output.sequences.shape[1] == PROMPT.shape[1] + 24
    assert do_sample or torch.equal(output.sequences, kit.plain_greedy(target, PROMPT, 24))
    assert output.statistics.num_draft_forwards == 1
    (warning,) = kit.our_warnings(caplog)
    assert "non-finite" in warning and "float16" in warning
