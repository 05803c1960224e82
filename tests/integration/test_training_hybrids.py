"""Relay rounds of a target with recurrent layers: blocks get the states that decoding will compute on them."""

import copy
from dataclasses import replace

import layouts
import pytest
import torch
from hybrids import FAMILIES, FIELDS, hybrid
from kit import MASK_TOKEN_ID, WEIGHT_STD, dflow_greedy, plain_greedy
from trainer_kit import tiny_trainer
from transformers import DynamicCache, Qwen3_5Config, Qwen3_5ForConditionalGeneration

from hf_dflow import DFlowDrafter, DFlowError, PairMismatchError, check_pair
from hf_dflow.generation._compat import cache_argument
from hf_dflow.generation.recurrent import clamping_mixers, steps_of_any_size
from hf_dflow.training import state_grid
from hf_dflow.training.answers import Sampling, answer_batch
from hf_dflow.training.config import Stage
from hf_dflow.training.data import TrainingRow
from hf_dflow.training.features import LiveFeatures
from hf_dflow.training.frozen_target import inner_model
from hf_dflow.training.packing import Anchors, Sequences
from hf_dflow.training.proposals import proposal_features
from hf_dflow.training.state_grid import StateGrid

BLOCK = 5
CHUNK = 8
DOCUMENTS = (13, 21)  # of the first row; the second holds one of 21 tokens, padding comes behind both
ANCHORS = [(0, 3), (1, 20), (0, 11), (0, 15), (0, 32), (1, 8), (0, 13), (1, 7), (0, 30)]
LAYERS = [0, 1, 3]  # the last with the final norm
TOLERANCE = 1e-3  # some parts compute in float32; a wrong state is off by a tenth and more


def rows() -> Sequences:
    generator = torch.Generator().manual_seed(2)
    starts = torch.tensor([0, DOCUMENTS[0], 0]).repeat_interleave(torch.tensor([*DOCUMENTS, 3]))
    return Sequences(
        torch.randint(1, MASK_TOKEN_ID, (2, 37), generator=generator),
        torch.tensor([sum(DOCUMENTS), DOCUMENTS[1]]),
        torch.empty(2, 37, 0),
        document_starts=torch.stack([starts, torch.zeros_like(starts)]),
    )


def anchors(shift: int = 0) -> Anchors:
    """The anchors of a round; in a later one all have moved on within their documents."""
    ends = [sequence_end(*place) for place in ANCHORS]
    positions = [min(position + shift, end - 1) for (_, position), end in zip(ANCHORS, ends, strict=True)]
    return Anchors(torch.tensor([row for row, _ in ANCHORS]), torch.tensor(positions))


def sequence_start(row: int, position: int) -> int:
    return DOCUMENTS[0] if row == 0 and position >= DOCUMENTS[0] else 0


def sequence_end(row: int, position: int) -> int:
    return sum(DOCUMENTS) if sequence_start(row, position) else DOCUMENTS[int(row == 1)]


@torch.no_grad()
def token_by_token(target, sequences: Sequences, row: int, position: int, proposals: torch.Tensor) -> torch.Tensor:
    """By hand: the anchor's document and its block, one token at a time on a fresh cache; the block's tapped states."""
    start = sequence_start(row, position)
    tokens = torch.cat([sequences.token_ids[row, start : position + 1], proposals])
    cache, states = DynamicCache(config=target.config.get_text_config()), []
    with steps_of_any_size(clamping_mixers(target)):  # a single token's are clamped where it is the first
        for place, token in enumerate(tokens):
            output = inner_model(target)(
                token[None, None],
                position_ids=torch.tensor([[place]]),
                output_hidden_states=True,
                use_cache=True,
                **{cache_argument(inner_model(target)): cache},
            )
            states.append(output.hidden_states)
    features = [torch.cat([state[layer + 1][0] for state in states]) for layer in LAYERS]
    return torch.cat(features, dim=-1)[position - start :]


def deviations(target, sequences: Sequences, shift: int = 0, seed: int = 3) -> list[float]:
    """Of each block: how far the features are off, in parts of their size."""
    proposals = torch.randint(
        1, MASK_TOKEN_ID, (len(ANCHORS), BLOCK - 1), generator=torch.Generator().manual_seed(seed)
    )
    places = anchors(shift)
    found = proposal_features(target, sequences, places, proposals, LAYERS)
    expected = [
        token_by_token(target, sequences, row, position, proposals[i])
        for i, (row, position) in enumerate(zip(places.row.tolist(), places.position.tolist(), strict=True))
    ]
    return [float((a - b).norm() / b.norm()) for a, b in zip(found, expected, strict=True)]


@pytest.fixture(autouse=True)
def short_chunks(monkeypatch):
    monkeypatch.setattr(state_grid, "CHUNK", CHUNK)


@pytest.mark.parametrize("family", [*FAMILIES, "qwen3_5_moe_text"])
def test_proposals_of_a_hybrid_get_the_states_of_single_token_forwards(family):
    """Catches: a state of another anchor or document, one not advanced to the anchor or left by an earlier round,
    keys of another prefix, and packed documents that leak into each other."""
    target, sequences = hybrid(family), rows()
    for shift, seed in ((0, 3), (4, 5)):
        assert max(deviations(target, sequences, shift, seed)) < TOLERANCE


def clamped(family: str):
    """A target that clamps many time steps where it runs over several tokens."""
    target = copy.deepcopy(hybrid(family))
    for mixer in clamping_mixers(target):
        mixer.time_step_limit = (0.7, float("inf"))
    return target


@pytest.mark.parametrize("family", ["nemotron_h", "zamba2"])
@torch.no_grad()
def test_answers_are_computed_as_in_decoding_where_prompts_are_not(family):
    """Catches: states of an answer computed as a prompt's, whose time steps these mixers clamp."""
    target = clamped(family)
    assert max(deviations(target, rows())) < TOLERANCE
    row = TrainingRow(list(range(1, 20)), 6, "", 0.0)
    cache, states = DynamicCache(config=target.config), []
    for part in torch.tensor([row.token_ids]).tensor_split([*range(6, 19)], dim=1):
        states.append(target(part, output_hidden_states=True, **{cache_argument(target): cache}).hidden_states)
    expected = torch.cat([torch.cat([state[layer + 1][0] for layer in LAYERS], dim=-1) for state in states])
    found = LiveFeatures([row], target, LAYERS, teacher_top_k=4)
    assert (found[0] - expected).norm() / expected.norm() < TOLERANCE
    assert len(found.teacher(0).ids) == len(row.token_ids)
    as_prompt = LiveFeatures([replace(row, prompt_length=0)], target, LAYERS)[0]
    assert (as_prompt - expected).norm() / expected.norm() > 10 * TOLERANCE, "the control"


@pytest.mark.parametrize("family", ["qwen3_5_text", "nemotron_h"])
def test_a_hybrid_with_an_adapter_is_the_adapted_one(family):
    """Catches: a cache that the adapter's wrapper passes on under another name, so that no state is read."""
    peft = pytest.importorskip("peft")
    torch.manual_seed(3)
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "o_proj"], init_lora_weights=False)
    base = copy.deepcopy(hybrid(family))
    adapted = peft.get_peft_model(base, config).eval().requires_grad_(False)
    assert max(deviations(adapted, rows())) < TOLERANCE
    row = TrainingRow(list(range(1, 20)), 6, "", 0.0)
    found, of_base = (LiveFeatures([row], one, LAYERS)[0] for one in (adapted, hybrid(family)))
    states = adapted(torch.tensor([row.token_ids]), output_hidden_states=True).hidden_states
    expected = torch.cat([states[layer + 1][0] for layer in LAYERS], dim=-1)
    assert (found - expected).norm() / expected.norm() < 10 * TOLERANCE
    assert (of_base - expected).norm() / expected.norm() > 30 * TOLERANCE


def test_a_multimodal_hybrid_is_trained_on_text():
    """Catches: the positions of three axes that such a class makes from those of the text, in blocks behind a state."""
    text = {**FIELDS, **FAMILIES["qwen3_5_text"]}
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        target = Qwen3_5ForConditionalGeneration(Qwen3_5Config(text_config=text, vision_config=vision)).eval()
        for parameter in target.parameters():
            if parameter.ndim > 1:
                torch.nn.init.normal_(parameter, std=WEIGHT_STD / 2)
    sequences = rows()
    for shift, seed in ((0, 3), (4, 5)):
        assert max(deviations(target, sequences, shift, seed)) < TOLERANCE


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_hybrid_trains_with_relay_rounds(family, packed, tmp_path):
    """Catches: a new drafter that does not fit, layers copied from a target that are none of a drafter's, and a run
    whose evaluation cannot decode."""
    target = copy.deepcopy(hybrid(family))
    trainer = tiny_trainer(
        tmp_path,
        target=target,
        prompts=[[5, 9, 2]],
        evaluate_every=2,
        stages=[Stage(2, 2, 2, 4)],
        num_hidden_layers=2,
        initialise_from_target=None,
        pack_rows=packed,
    )
    assert not trainer.training.initialise_from_target, "no family has two last layers of a drafter's kind"
    trainer.run()
    assert trainer.update == 2 and trainer.skipped == 0
    assert all(weight.isfinite().all() for weight in trainer.drafter.parameters())


def test_a_target_that_computes_blocks_wrongly_is_refused_before_training(tmp_path):
    """Catches: relay rounds on states that the target would not have in decoding. Jamba's blocks forget its state."""
    with pytest.raises(DFlowError, match=r"JambaForCausalLM does not compute a block .* logits differ"):
        tiny_trainer(tmp_path, target=hybrid("jamba"), initialise_from_target=False)


def neighbours_state(grid: StateGrid) -> None:
    grid.states = [{place: held.roll(1, dims=0) for place, held in states.items()} for states in grid.states]


def state_not_advanced(grid: StateGrid) -> None:
    """At each grid point the state of the one before; documents that are longer are among the first's."""
    for number in range(len(grid.states) - 1, 0, -1):
        held = (grid.lengths > (number - 1) * grid.spacing).nonzero()[:, 0].tolist()
        kept = [held.index(i) for i in (grid.lengths > number * grid.spacing).nonzero()[:, 0].tolist()]
        grid.states[number] = {place: states[kept] for place, states in grid.states[number - 1].items()}


def neighbours_keys(grid: StateGrid) -> None:
    grid.keys_values = {layer: tuple(held.roll(1, dims=0) for held in pair) for layer, pair in grid.keys_values.items()}


@pytest.mark.parametrize("harm", [neighbours_state, state_not_advanced, neighbours_keys])
@pytest.mark.parametrize("family", ["qwen3_5_text", "lfm2", "falcon_h1"])
def test_a_wrong_state_would_be_seen(family, harm):
    """The control of the test before: that its tolerance tells a wrong prefix from rounding."""
    target, sequences = hybrid(family), rows()
    deviations(target, sequences)
    harm(sequences.target_cache)
    assert max(deviations(target, sequences)) > 30 * TOLERANCE


def test_documents_that_leak_would_be_seen():
    """The control for packed rows: one state that runs through all documents of a row."""
    sequences = rows()
    sequences.document_starts = None
    assert max(deviations(hybrid("qwen3_5_text"), sequences)) > 30 * TOLERANCE


def states_of(grid: StateGrid) -> list[int]:
    """How many documents each grid point holds a state of."""
    lengths = [{len(held) for held in states.values()} for states in grid.states]
    assert all(len(of_point) == 1 for of_point in lengths)
    return [of_point.pop() for of_point in lengths]


def test_memory_is_bounded_and_the_bounds_change_nothing(monkeypatch):
    """Catches: a state for each token or anchor, all anchors in one forward, and a wider grid that is read wrongly."""
    target, sequences = hybrid("qwen3_next"), rows()
    deviations(target, sequences)
    grid = sequences.target_cache
    state = sum(held[0].nbytes for held in grid.states[0].values())
    # At the start, behind 8 and behind 16 tokens of documents of 13, 21 and 21.
    assert states_of(grid) == [3, 3, 2] and grid.spacing == CHUNK
    monkeypatch.setattr(state_grid, "GRID_BYTES", 3 * state)
    monkeypatch.setattr(state_grid, "FORWARD_BYTES", 1)
    batches = []
    forward = StateGrid._forward

    def counting(grid, token_ids, places, cache):
        batches.append(len(token_ids))
        return forward(grid, token_ids, places, cache)

    monkeypatch.setattr(StateGrid, "_forward", counting)
    sequences = rows()
    assert max(deviations(target, sequences)) < TOLERANCE
    grid = sequences.target_cache
    assert states_of(grid) == [3, 2] and grid.spacing == 2 * CHUNK
    assert batches == [3, 3] + [1] * len(ANCHORS)  # the documents' chunks, then the blocks one by one


def test_a_round_runs_its_blocks_and_no_more_than_a_chunk_before_each(monkeypatch):
    """Catches: every round running the documents again, or a block running all of its document."""
    widths = []
    forward = StateGrid._forward

    def counting(grid, token_ids, places, cache):
        widths.append(token_ids.shape[1])
        return forward(grid, token_ids, places, cache)

    monkeypatch.setattr(StateGrid, "_forward", counting)
    target, sequences = hybrid("lfm2"), rows()
    proposals = torch.ones(len(ANCHORS), BLOCK - 1, dtype=torch.long)
    for number in range(3):
        proposal_features(target, sequences, anchors(number), proposals, LAYERS)
        documents, blocks = (widths[:2], widths[2:]) if number == 0 else ([], widths)
        assert documents == [CHUNK] * len(documents)
        assert len(blocks) == 3 and max(blocks) < CHUNK + BLOCK  # one forward for each chunk that an anchor is in
        widths.clear()


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_taps_count_every_decoder_layer(family):
    """Catches: ids that count attention layers alone, or the states of the layer before; published drafters for such
    targets name linear layers as well."""
    target = hybrid(family)
    row = TrainingRow(list(range(1, 20)), 0, "", 0.0)  # one forward
    layers, seen = inner_model(target).layers, {}
    handles = [
        layer.register_forward_hook(
            lambda module, args, output, number=number: seen.__setitem__(
                number, output[0] if isinstance(output, tuple) else output
            )
        )
        for number, layer in enumerate(layers)
    ]
    taps = list(range(len(layers) - 1))  # the last carries the final norm
    features = LiveFeatures([row], target, taps)[0]
    for handle in handles:
        handle.remove()
    assert len(layers) == target.config.num_hidden_layers
    torch.testing.assert_close(features, torch.cat([seen[number][0] for number in taps], dim=-1))


def test_a_published_layout_for_a_hybrid_target_loads_and_drafts(tmp_path):
    """Catches: `num_target_layers` or `target_layer_ids` of z-lab's files, which count linear layers, held against
    the attention layers alone."""
    target = hybrid("qwen3_5_text")
    layouts.write("dflash", tmp_path, target, layers="full")
    # As in the files of drafters for Qwen3.5: all decoder layers are counted, and a plain rotary base is given.
    published = {"dflash_config.target_layer_ids": [0, 2], "num_target_layers": 4, "rope_theta": 10_000_000}
    layouts.edit(tmp_path, published)
    drafter = DFlowDrafter.from_pretrained(tmp_path, dtype=torch.float32)
    assert drafter.config.target_layer_ids == [0, 2] and drafter.config.num_target_layers == 4
    check_pair(target, drafter)
    prompt = torch.tensor([[5, 9, 2, 7]])
    output = dflow_greedy(target, drafter, prompt, max_new_tokens=12)
    assert torch.equal(output.sequences, plain_greedy(target, prompt, 12))
    layouts.edit(tmp_path, {"num_target_layers": 3})
    with pytest.raises(PairMismatchError, match="4 layers"):
        check_pair(target, DFlowDrafter.from_pretrained(tmp_path, dtype=torch.float32))


@pytest.mark.parametrize("family", FAMILIES)
def test_answers_of_a_padded_batch_are_those_of_single_prompts(family):
    """Catches: data whose answers the target would not give to a prompt by itself, as padding got into a state."""
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(1, 60, (length,), generator=generator).tolist() for length in (3, 9, 14)]
    target, sampling = copy.deepcopy(hybrid(family)), Sampling(max_new_tokens=12)
    together = answer_batch(target, prompts, sampling, 0, set(), 0)
    assert together == [answer_batch(target, [prompt], sampling, 0, set(), 0)[0] for prompt in prompts]
