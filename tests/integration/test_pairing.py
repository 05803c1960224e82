"""What drafter and target share: tapped states, embedding and head, each as the drafter's configuration says."""

import kit
import pytest
import torch
from internals import capture_features
from torch import nn

from hf_dflow import AcceptanceProcessor, DFlowDrafter

ROUNDING = 1e-5  # relative; norms and softmax of transformers round to float32 whatever the model is in
NEW_TOKENS = 24


class LowRank(nn.Module):
    """What an adapter library leaves in a linear layer's place."""

    def __init__(self, base: nn.Linear):
        super().__init__()
        self.base = base
        generator = torch.Generator().manual_seed(4)
        self.down = nn.Parameter(torch.randn(2, base.in_features, generator=generator).to(base.weight) * 0.3)
        self.up = nn.Parameter(torch.randn(base.out_features, 2, generator=generator).to(base.weight) * 0.3)

    def forward(self, states):
        return self.base(states) + states @ self.down.T @ self.up.T


# -- tapped states (C7)


@pytest.mark.parametrize("family", kit.FAMILIES)
def test_layer_id_means_the_output_of_that_layer(family):
    """Catches an off-by-one between layer ids and hidden states, and a last layer read before the final norm."""
    target, prompt = kit.tiny_target(family), kit.prompt_of(9)
    base = getattr(target, target.base_model_prefix)
    layers = base.h if family == "gpt2" else base.layers
    ids = [0, len(layers) // 2, len(layers) - 1]
    recorded = {}
    for i in ids:
        layers[i].register_forward_hook(
            lambda module, args, output, i=i: recorded.__setitem__(
                i, output[0] if isinstance(output, tuple) else output
            )
        )
    out = target(prompt, output_hidden_states=True)
    norm = base.ln_f if family == "gpt2" else base.norm
    expected = [recorded[ids[0]], recorded[ids[1]], norm(recorded[ids[2]])]
    documented = [out.hidden_states[i + 1] for i in ids]
    assert len(out.hidden_states) == len(layers) + 1
    captured = capture_features(out.hidden_states, ids).split(kit.HIDDEN_SIZE, dim=-1)
    for part, hook, entry in zip(captured, expected, documented, strict=True):
        assert torch.equal(part, hook) and torch.equal(part, entry)


@pytest.mark.parametrize("adapted", [False, True])
@pytest.mark.parametrize("family", kit.FAMILIES)
def test_the_loop_feeds_the_documented_states_of_every_committed_token(family, adapted):
    """Catches features of rejected rows, rows lost or doubled between steps, and states of the un-adapted model."""
    target, prompt = kit.tiny_target(family), kit.prompt_of(9)
    if adapted:
        name = "c_proj" if family == "gpt2" else "down_proj"
        for module in list(target.modules()):
            base = getattr(module, name, None)
            if isinstance(base, nn.Linear):
                setattr(module, name, LowRank(base))
    last = target.config.num_hidden_layers - 1
    ids = [0, last // 2, last]
    drafter = kit.scripted(
        kit.PatternDrafter, target, prompt, NEW_TOKENS, pattern=[5, 1, 0, 3], target_layer_ids=ids, relay=None
    )
    recorder, before = kit.ContextRecorder(drafter), kit.weights_of(target)
    out = kit.dflow_greedy(target, drafter, prompt, max_new_tokens=NEW_TOKENS)
    kit.assert_not_vacuous(out.statistics)
    assert torch.equal(out.sequences, kit.plain_greedy(target, prompt, NEW_TOKENS))
    kit.assert_weights(target, before)
    prefill = target(prompt, output_hidden_states=True, use_cache=True).hidden_states
    assert torch.equal(recorder.rows[0], torch.cat([prefill[i + 1] for i in ids], dim=-1))
    rows = torch.cat(recorder.rows, dim=1)
    whole = target(out.sequences, output_hidden_states=True, use_cache=False).hidden_states
    expected = torch.cat([whole[i + 1] for i in ids], dim=-1)[:, : rows.shape[1]]
    assert rows.shape[1] > prompt.shape[1] + NEW_TOKENS // 2
    assert (rows - expected).abs().max() < ROUNDING * expected.abs().max()


# -- embedding and head (C8)


class DraftRecorder(AcceptanceProcessor):
    """Keeps the first draft logits of a call."""

    def __init__(self):
        self.first = None

    def __deepcopy__(self, memo):
        return self

    def adjust_draft_logits(self, draft_logits, feedback):
        if self.first is None:
            self.first = draft_logits.clone()
        return draft_logits


def _random_own(drafter: DFlowDrafter) -> None:
    generator = torch.Generator().manual_seed(6)
    for module in (drafter.embed_tokens, drafter.lm_head):
        if module is not None:
            module.weight.copy_(torch.randn(module.weight.shape, generator=generator))


SHARING = {
    "tied": ("qwen3", {}),
    "untied": ("llama", {}),
    "raw embedding of a scaling target": ("gemma", {}),
    "scaled by the target": ("gemma", {"input_embedding": "target"}),
    "scaled by the drafter": ("llama", {"input_embedding_scale": 5.5}),
    "multiplier": ("llama", {"output_multiplier": 0.3}),
    "soft-capped by the drafter": ("llama", {"final_logit_softcapping": 2.0, "output_multiplier": 1.5}),
    "own reduced head": ("llama", {"output_head": "own", "vocab_size": 40, "mask_token_id": 39}),
    "own embedding": ("llama", {"input_embedding": "own"}),
    "own both, other width": (
        "llama",
        {"input_embedding": "own", "output_head": "own", "hidden_size": 24, "target_hidden_size": kit.HIDDEN_SIZE},
    ),
    "own both, reduced": (
        "llama",
        {"input_embedding": "own", "output_head": "own", "vocab_size": 40, "mask_token_id": 39},
    ),
    "fake quantised head": ("llama", {}),
}


def _reference_logits(target, drafter, head_weight, prompt, anchor: int) -> torch.Tensor:
    """Draft logits of the first block, written out: what the configuration's text says, no code of the loop."""
    config = drafter.config
    states = target(prompt, output_hidden_states=True).hidden_states
    context = torch.cat([states[i + 1] for i in config.target_layer_ids], dim=-1)
    block = torch.tensor([[anchor] + [config.mask_token_id] * (config.block_size - 1)])
    table = target.get_input_embeddings()
    embeds = {
        "raw": lambda: table.weight[block],
        "target": lambda: table(block),
        "own": lambda: drafter.embed_tokens.weight[block.where(block < config.vocab_size, config.mask_token_id)],
    }[config.input_embedding]()
    hidden = drafter(noise_embeds=embeds * config.input_embedding_scale, context_hidden_states=context)
    weight = drafter.lm_head.weight if config.output_head == "own" else head_weight
    logits = hidden.last_hidden_state[:, 1:] @ weight.T * config.output_multiplier
    if config.final_logit_softcapping:
        logits = config.final_logit_softcapping * torch.tanh(logits / config.final_logit_softcapping)
    missing = torch.full((*logits.shape[:-1], kit.VOCAB_SIZE - logits.shape[-1]), -torch.inf)
    logits = torch.cat([logits, missing], dim=-1)
    logits[..., config.mask_token_id] = -torch.inf
    return logits


@pytest.mark.parametrize("name", SHARING)
def test_draft_logits_follow_the_configuration(name):
    """Catches a scale or cap taken from the target against the config, a head shared although the drafter has its
    own, code that needs a dense head, and any write into the target's weights."""
    family, overrides = SHARING[name]
    target, prompt = kit.tiny_target(family), kit.prompt_of(9)
    drafter = kit.tiny_drafter(target, 6, **overrides)
    _random_own(drafter)
    expected = kit.plain_greedy(target, prompt, NEW_TOKENS)
    head_weight = target.get_output_embeddings().weight
    reference = _reference_logits(target, drafter, head_weight, prompt, int(expected[0, prompt.shape[1]]))
    if name == "fake quantised head":
        target.lm_head = kit.FakeQuantized(target.lm_head)
    before, recorder = kit.weights_of(target), DraftRecorder()
    drafter.config.generation_defaults = {"acceptance_processors": [recorder]}
    out = kit.dflow_greedy(target, drafter, prompt, max_new_tokens=NEW_TOKENS)
    assert torch.equal(out.sequences, expected)
    kit.assert_weights(target, before)
    assert recorder.first.shape == reference.shape
    assert torch.allclose(recorder.first.to(reference), reference, rtol=ROUNDING, atol=ROUNDING)
    assert reference[reference.isfinite()].std() > 0.1


def test_an_anchor_outside_the_drafters_own_vocabulary():
    """Catches an index error once the target says a token that the drafter's own embedding has no row for."""
    target, prompt = kit.tiny_target(), kit.prompt_of(9)
    drafter = kit.tiny_drafter(
        target, 4, input_embedding="own", output_head="own", vocab_size=8, mask_token_id=7, relay="random"
    )
    out = kit.dflow_greedy(target, drafter, prompt, max_new_tokens=NEW_TOKENS)
    expected = kit.plain_greedy(target, prompt, NEW_TOKENS)
    assert torch.equal(out.sequences, expected) and int(expected[0, prompt.shape[1] :].max()) >= 8


@pytest.mark.parametrize("family", ["qwen3", "gemma"])
def test_the_mask_embedding_is_the_mask_tokens_row(family):
    """Catches masked slots filled with another row: their state must change with that row and with no other."""
    target, prompt = kit.tiny_target(family, tie_word_embeddings=False), kit.prompt_of(9)
    drafter = kit.tiny_drafter(target, 4, relay=None)

    def first_draft():
        recorder = DraftRecorder()
        drafter.config.generation_defaults = {"acceptance_processors": [recorder]}
        kit.dflow_greedy(target, drafter, prompt, max_new_tokens=6)
        return recorder.first

    before = first_draft()
    with torch.no_grad():
        target.get_input_embeddings().weight[kit.MASK_TOKEN_ID] *= -2.0  # the target itself never reads this row
    assert (first_draft() - before)[..., : kit.MASK_TOKEN_ID].abs().max() > 1e-3


class ScaledHead(torch.nn.Module):
    """A head of whole numbers and scales, as GPTQ has it: it computes in the type of its scales."""

    def __init__(self, dense: torch.nn.Linear, dtype: torch.dtype):
        super().__init__()
        weight = dense.weight.float()
        self.register_buffer("scales", (weight.abs().amax(1) / 127).to(dtype))
        self.register_buffer("qweight", (weight / self.scales.float()[:, None]).round().to(torch.int8))

    def forward(self, states):
        return torch.nn.functional.linear(states, self.qweight.to(self.scales.dtype) * self.scales[:, None])


@pytest.mark.parametrize("shows", ["qweight", "weight"])
def test_drafter_of_another_type_than_a_quantised_head(shows):
    """N5: states of the drafter's type handed to a head that computes in another, whose weight is none or whole."""
    target = kit.tiny_target(dtype=torch.float32)
    head = ScaledHead(target.lm_head, torch.float32)
    if shows == "weight":
        head.register_buffer("weight", head.qweight)
    target.lm_head = head
    target.get_output_embeddings = lambda: head
    drafter = kit.tiny_drafter(target, 8, dtype=torch.bfloat16)
    prompt = kit.prompt_of(9)
    output = kit.dflow_greedy(target, drafter, prompt, max_new_tokens=12)
    assert torch.equal(output.sequences, kit.plain_greedy(target, prompt, 12))
    assert output.statistics.num_draft_forwards
