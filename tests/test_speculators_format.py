"""Checkpoints in vLLM's speculators layout: the numbers of speculators itself, and nothing of it guessed."""

import json

import dflash_oracle as tiny
import pytest
import speculators_oracle as oracle
import torch
from dflash_oracle import BLOCK_SIZE, DFLASH2, MASK_TOKEN_ID, VOCAB_SIZE, WINDOW
from kit import assert_not_vacuous, dflow_greedy, plain_greedy, prompt_of
from memorize import memorize
from safetensors.torch import load_file, save_file

from hf_dflow import DFlowDrafter, DFlowGenerationConfig, DrafterConfigError, DrafterWeightsError
from hf_dflow.checkpoints.dflash import DFlash2Layout
from hf_dflow.generation._compat import capture_features

TOLERANCE = 1e-5  # the convolutions' sums, in another order, differ by more in float32
NEW_TOKENS, PROMPT_LENGTH = 40, 2 * WINDOW


@pytest.fixture(scope="module")
def target():
    target = tiny.tiny_target(seed=7).double()
    with torch.no_grad():
        target.lm_head.weight[MASK_TOKEN_ID] *= 0.01
    return target


@torch.no_grad()
def our_logits(drafter, target, token_ids, features, anchor):
    block = torch.full((1, BLOCK_SIZE), MASK_TOKEN_ID)
    block[0, 0] = token_ids[0, anchor]
    embeds = drafter.embed(block, target.get_input_embeddings())
    hidden = drafter(embeds, features[:, :anchor]).last_hidden_state
    return drafter.compute_logits(hidden, target.lm_head)[0]


def spread(logits, reduced):
    """Their logits over the draft vocabulary, where ours are over the target's."""
    if not reduced:
        return logits
    everything = logits.new_full((len(logits), VOCAB_SIZE), -torch.inf)
    everything[:, oracle.DRAFT_VOCAB] = logits
    return everything


@pytest.mark.parametrize("name", oracle.VARIANTS)
def test_logits_equal_theirs(name, tmp_path, target):
    """Bug: layers tapped one off, a window measured from each row, `d2t` read as ids, another head or embedding."""
    theirs = oracle.make_folder(tmp_path, target, **oracle.VARIANTS[name]).double()
    drafter = DFlowDrafter.from_pretrained(tmp_path).double()
    token_ids, features = prompt_of(40), tiny.features_of(40).double()
    for anchor in (1, WINDOW - 1, WINDOW, WINDOW + 1, 30):
        expected = spread(oracle.oracle_logits(theirs, token_ids, features, anchor), theirs.use_draft_vocab)
        found = our_logits(drafter, target, token_ids, features, anchor)
        torch.testing.assert_close(found, expected, atol=TOLERANCE, rtol=TOLERANCE)
    assert drafter.config.target_layer_ids == tiny.TARGET_LAYER_IDS and drafter.relay is None


def test_variants_differ_from_each_other(tmp_path, target):
    """Bug: a setting that neither side applies, so that the comparison above compares nothing."""
    found = []
    names = ("full", "mixed", "sliding", "sliding, not causal", "own embedding", "dflash2", "dflash2, causal")
    for i, name in enumerate(names):
        oracle.make_folder(tmp_path / str(i), target, **oracle.VARIANTS[name])
        drafter = DFlowDrafter.from_pretrained(tmp_path / str(i)).double()
        found.append(our_logits(drafter, target, prompt_of(40), tiny.features_of(40).double(), 30))
    for i, one in enumerate(found):
        assert all((one - other).abs().max() > 0.01 for other in found[:i])


def choose(theirs, logits, hidden, previous):
    """The token of a slot: the likeliest, or the one that their selector puts behind `previous`."""
    if not hasattr(theirs, "candidate_selector"):
        return int(logits.argmax())
    ids, scores = theirs.candidate_selector.select(logits[None], hidden[None], torch.tensor([previous]))
    return int(ids[0, scores[0].argmax()])


@torch.no_grad()
def their_accepted_lengths(theirs, target, text, prompt_length, new_tokens):
    """A loop of its own over their logits: at each anchor the longest prefix of their drafts that `text` confirms."""
    first = 0 if theirs.config.sample_from_anchor else 1
    states = capture_features(target(text, output_hidden_states=True).hidden_states, tiny.TARGET_LAYER_IDS)
    lengths, anchor = [], prompt_length
    end = prompt_length + new_tokens
    while end - anchor > BLOCK_SIZE + 1:
        hidden, logits = oracle.oracle_block(theirs, text, states, anchor)
        hidden, logits = hidden[first:], spread(logits, theirs.use_draft_vocab)[first:]
        logits[:, MASK_TOKEN_ID] = -torch.inf
        accepted, token = 0, int(text[0, anchor])
        for i, slot in enumerate(logits):
            token = choose(theirs, slot, hidden[i], token)
            if token != int(text[0, anchor + 1 + i]):
                break
            accepted = i + 1
        lengths.append(accepted)
        anchor += accepted + 1
    return lengths


@pytest.mark.parametrize("name", oracle.VARIANTS)
def test_accepted_lengths_equal_theirs(name, tmp_path, target):
    """Bug: drafts of the wrong rows (one too few or many where the anchor's row drafts), a cache cut too short."""
    theirs = oracle.make_folder(tmp_path, target, **oracle.VARIANTS[name]).double()
    drafter = DFlowDrafter.from_pretrained(tmp_path).double()
    prompt = prompt_of(PROMPT_LENGTH)
    text = plain_greedy(target, prompt, NEW_TOKENS + BLOCK_SIZE + 1)
    if drafter.candidate_selector is not None:
        with torch.no_grad():
            drafter.candidate_selector.successor_codebook.weight *= 0.4  # not trained: let it err now and then
    memorize(drafter, target, text, prompt_length=PROMPT_LENGTH)
    theirs_of = {ours: name for name, ours in DFlash2Layout.renamed.items()}
    renamed = {theirs_of.get(key, key): value for key, value in drafter.state_dict().items()}
    renamed.pop("draft_token_ids", None)
    missing, unexpected = theirs.load_state_dict(renamed, strict=False)
    own = ("layers", "fc", "norm", "hidden", "candidate")
    assert not unexpected and not [key for key in missing if key.startswith(own)]
    ours = dflow_greedy(target, drafter, prompt, max_new_tokens=NEW_TOKENS)
    expected = their_accepted_lengths(theirs, target, text, PROMPT_LENGTH, NEW_TOKENS)
    assert torch.equal(ours.sequences, text[:, : PROMPT_LENGTH + NEW_TOKENS])
    assert ours.statistics.per_step_accepted[: len(expected)] == expected and len(expected) > 4
    assert_not_vacuous(ours.statistics)
    full_block = BLOCK_SIZE if drafter.config.sample_from_anchor else BLOCK_SIZE - 1
    assert max(ours.statistics.per_step_drafted) == full_block


def edit(path, **changes):
    file = path / "config.json"
    raw = {**json.loads(file.read_text()), **changes}
    file.write_text(json.dumps({key: value for key, value in raw.items() if value is not None}))


@pytest.mark.parametrize(
    "changes, named",
    [
        ({"block_size": None}, "block_size"),
        ({"mask_token_id": None}, "mask_token_id"),
        ({"aux_hidden_state_layer_ids": None}, "aux_hidden_state_layer_ids"),
        ({"aux_hidden_state_layer_ids": [0, 2]}, "entry 0"),
        ({"transformer_layer_config": None}, "transformer_layer_config"),
        ({"transformer_layer_config": {"model_type": "no-such"}}, "no-such"),
        ({"draft_vocab_size": 8}, "d2t"),
        ({"speculators_model_type": "dspark"}, "dspark"),
        ({"speculators_model_type": "xpress"}, "xpress"),
        ({"speculators_model_type": "peagle"}, "peagle"),
        ({"speculators_model_type": "dflash2"}, "conv_kernel_size"),
        ({"selector_rank": 6}, "selector_rank"),
        ({"embed_scale": 2.0}, "embed_scale"),
    ],
)
def test_gaps_and_other_kinds_are_named(changes, named, tmp_path, target):
    """Bug: a guessed key, or a sibling format that loads and drafts nonsense."""
    oracle.make_folder(tmp_path, target)
    edit(tmp_path, **changes)
    with pytest.raises(DrafterConfigError, match=named) as error:
        DFlowDrafter.from_pretrained(tmp_path)
    assert f"{tmp_path}/config.json" in str(error.value)


@pytest.mark.parametrize("key", DFLASH2)
def test_a_missing_key_of_dflash2_is_named(key, tmp_path, target):
    """Bug: a selector or convolution of a guessed size."""
    oracle.make_folder(tmp_path, target, kind="dflash2")
    edit(tmp_path, **{key: None})
    with pytest.raises(DrafterConfigError, match=key):
        DFlowDrafter.from_pretrained(tmp_path)


def test_dflash2_is_bidirectional_unless_told_otherwise(tmp_path, target):
    """Bug: the default of its elder, under which later slots of a block are hidden from earlier ones."""
    oracle.make_folder(tmp_path, target, kind="dflash2", layers=oracle.SLIDING)
    edit(tmp_path, sliding_window_non_causal=None)
    assert DFlowDrafter.from_pretrained(tmp_path).config.sliding_is_causal is False


def test_vocabulary_maps_that_contradict_each_other(tmp_path, target):
    """Bug: drafts said under other tokens' names."""
    oracle.make_folder(tmp_path, target, **oracle.VARIANTS["reduced vocabulary"])
    weights = load_file(tmp_path / "model.safetensors")
    weights["t2d"] = weights["t2d"].roll(1)
    save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(DrafterWeightsError, match="t2d"):
        DFlowDrafter.from_pretrained(tmp_path)


def test_a_recorded_number_of_drafts_becomes_the_default(tmp_path, target):
    """Bug: a drafter that its makers run with fewer tokens drafts whole blocks here."""
    oracle.make_folder(tmp_path, target)
    settings = json.loads((tmp_path / "config.json").read_text())["speculators_config"]
    settings["proposal_methods"][0]["speculative_tokens"] = 2
    settings["verifier"]["name_or_path"] = "org/target"
    edit(tmp_path, speculators_config=settings)
    config = DFlowDrafter.from_pretrained(tmp_path).config
    assert config.generation_defaults == {"num_draft_tokens": 2} and config.target_name == "org/target"


@pytest.mark.parametrize("name", ["mixed", "from the anchor", "dflash2, from the anchor"])
def test_a_relay_on_top_and_the_way_back(name, tmp_path, target):
    """Bug: a relay that a converted drafter takes and never hears, that changes the text, or is lost in saving."""
    oracle.make_folder(tmp_path / "theirs", target, **oracle.VARIANTS[name])
    drafter = DFlowDrafter.from_pretrained(tmp_path / "theirs", use_relay=True).double()
    prompt = prompt_of(PROMPT_LENGTH)
    text = plain_greedy(target, prompt, NEW_TOKENS + BLOCK_SIZE + 1)
    memorize(drafter, target, text, prompt_length=PROMPT_LENGTH)
    untrained = dflow_greedy(target, drafter, prompt, max_new_tokens=NEW_TOKENS).statistics.per_step_accepted
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for layer, size in ((drafter.relay.up_proj, 0.02), (drafter.relay.down_proj, 0.3)):
            layer.weight.copy_(torch.randn(layer.weight.shape, generator=generator) * size)
    drafter.save_pretrained(tmp_path / "ours")
    again = DFlowDrafter.from_pretrained(tmp_path / "ours", dtype=torch.float64)
    assert all(torch.equal(value, again.state_dict()[key]) for key, value in drafter.state_dict().items())
    found = dflow_greedy(target, again, prompt, max_new_tokens=NEW_TOKENS)
    assert torch.equal(found.sequences, text[:, : PROMPT_LENGTH + NEW_TOKENS])
    assert_not_vacuous(found.statistics)
    assert found.statistics.per_step_accepted != untrained
    config = DFlowGenerationConfig(max_new_tokens=NEW_TOKENS, do_sample=False, return_dict_in_generate=True)
    config.use_relay = False
    off = target.generate(prompt, assistant_model=again, generation_config=config)
    assert off.statistics.per_step_accepted == untrained
