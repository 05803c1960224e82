"""Static caches: the same text in the same room, and blocks compiled where plain decoding compiles."""

from functools import cache

import kit
import pytest
import torch
from batches import following, generate, new_tokens_of, plain_ids, target_of
from internals import needs_croppable_static
from transformers import CompileConfig, StaticCache

from hf_dflow import AcceptanceProcessor

pytestmark = needs_croppable_static

BLOCK_SIZE, NEW_TOKENS = 8, 40
PATTERN = [3, 0, 7, 1, 5]
PROMPT = kit.prompt_of(13, seed=8)
EVERYTHING = {"output_scores": True, "output_logits": True, "output_hidden_states": True, "output_attentions": True}


# -- room (C3)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("own", [False, True])
def test_static_cache(family, own):
    """C3: a static cache that is reallocated, keeps rejected drafts, or has no room for the last block."""
    target, new_tokens = kit.shared_target(family), 24
    plain = kit.plain_greedy(target, PROMPT, new_tokens, cache_implementation="static", return_dict_in_generate=True)
    drafter = kit.scripted(kit.PatternDrafter, target, PROMPT, new_tokens, pattern=PATTERN)
    room = PROMPT.shape[1] + new_tokens - 1
    held = StaticCache(config=target.config, max_cache_len=room)
    options = {kit.CACHE: held} if own else {"cache_implementation": "static"}
    options |= {"output_attentions": True, "output_hidden_states": True, "max_new_tokens": new_tokens}
    output = kit.dflow_greedy(target, drafter, PROMPT, **options)
    assert torch.equal(output.sequences, plain.sequences)
    assert torch.equal(output.sequences, kit.plain_greedy(target, PROMPT, new_tokens))
    kit.assert_not_vacuous(output.statistics)
    assert isinstance(kit.cache_of(output), StaticCache) and (not own or kit.cache_of(output) is held)
    assert int(kit.cache_of(output).get_seq_length()) == int(kit.cache_of(plain).get_seq_length()) == room
    assert {layer.shape[-1] for step in output.attentions[1:] for layer in step} == {room}
    for layer, other in zip(kit.cache_of(output).layers, kit.cache_of(plain).layers, strict=True):
        torch.testing.assert_close(layer.keys[:, :, :room], other.keys[:, :, :room], atol=1e-5, rtol=1e-5)


def test_static_cache_that_is_just_large_enough(target):
    """C3: drafts written past the end of a static cache, where the text itself ends in time."""
    words = kit.plain_greedy(target, PROMPT, 32)[0, 13:].tolist()
    # Inside a block: its other drafts would be written behind the end.
    end = next(i for i, token in enumerate(words) if i >= 3 and i % 8 in (1, 2, 3, 4) and token not in words[:i])
    held = StaticCache(config=target.config, max_cache_len=13 + end)
    drafter = kit.scripted(kit.OracleDrafter, target, PROMPT, 24)
    options = {"eos_token_id": words[end], "max_new_tokens": 24, kit.CACHE: held}
    assert kit.dflow_greedy(target, drafter, PROMPT, **options).sequences[0, 13:].tolist() == words[: end + 1]


def test_static_cache_of_a_batch(caplog):
    """C3: rows that share a static cache's one length."""
    rows = [0, 1, 3]
    drafter = following(kit.PatternDrafter, rows, 24, pattern=PATTERN, offset=2)
    output = generate(rows, drafter, 24, cache_implementation="static")
    assert [new_tokens_of(output, i, rows) for i in range(3)] == [plain_ids(row, 24) for row in rows]
    assert getattr(output, kit.CACHE) is None
    assert any("row by row" in warning for warning in kit.our_warnings(caplog))


# -- compiled blocks


def on_any_device(**options) -> CompileConfig:
    """A setting under which transformers compiles on a CPU as well, which it does for its own tests only."""
    config = CompileConfig(mode=None, **options)
    config._compile_all_devices = True
    return config


@cache
def setting(dtype=torch.float64):
    target = kit.tiny_target("llama", num_hidden_layers=3, dtype=dtype)
    return target, {
        cls: kit.scripted(cls, target, PROMPT, 120, pattern=PATTERN)
        for cls in (kit.PatternDrafter, kit.OracleDrafter, kit.HostileDrafter, kit.NudgedDrafter)
    }


class Graph:
    """In a compiled forward's place: keeps the widths it ran at. Like a CUDA graph it gives its outputs out in the same
    memory each time; before it runs again, what it gave out becomes NaN."""

    def __init__(self, model):
        self.model, self.widths, self._given = model, [], []

    def __call__(self, **inputs):
        for tensor in self._given:
            tensor.fill_(torch.nan)
        self.widths.append(inputs["input_ids"].shape[1])
        outputs = self.model(**inputs)
        self._given = [outputs.logits, *(outputs.hidden_states or ()), *(outputs.attentions or ())]
        return outputs


@pytest.fixture
def graph(monkeypatch):
    target = setting()[0]
    made = Graph(target)
    monkeypatch.setattr(target, "get_compiled_call", lambda config: made, raising=False)
    return made


def static(drafter_class, new_tokens=NEW_TOKENS, **options):
    target, drafters = setting()
    options = {"cache_implementation": "static", "compile_config": on_any_device(), **options}
    return kit.dflow_greedy(target, drafters[drafter_class], PROMPT, max_new_tokens=new_tokens, **options)


def test_torch_compiles_one_graph_and_says_the_same():
    """Recompiling for each length that a block is cut to, or in each call; a prompt or a short block compiled at all;
    text that a compiled forward changes."""
    target, drafters = setting()
    widths = []

    def backend(module, example_inputs):
        def run(*inputs):
            widths.append([tensor.shape[1] for tensor in inputs if tensor.dtype == torch.long and tensor.ndim == 2][:1])
            return module.forward(*inputs)

        compiled.append(module)
        return run

    compiled: list = []
    config = on_any_device(backend=backend)
    torch._dynamo.reset()
    for _ in range(2):
        options = {"cache_implementation": "static", "compile_config": config}
        output = kit.decode(target, drafters[kit.PatternDrafter], PROMPT, NEW_TOKENS, **options)
        assert torch.equal(output.sequences, kit.plain_greedy(target, PROMPT, NEW_TOKENS))
        kit.assert_not_vacuous(output.statistics)
        assert len(compiled) == 1
    whole = output.statistics.per_step_drafted.count(BLOCK_SIZE - 1)
    assert widths == [[BLOCK_SIZE]] * 2 * whole and 0 < whole < output.statistics.num_target_forwards - 1
    torch._dynamo.reset()
    del target._compiled_call, target._last_compile_config


@pytest.mark.parametrize(
    "drafter_class", [kit.PatternDrafter, kit.OracleDrafter, kit.HostileDrafter, kit.NudgedDrafter]
)
def test_shapes_that_recur_run_compiled(graph, drafter_class):
    """A compilation, half a minute long, for a block that the length limit cuts; or pauses of a useless drafter that
    run slower than plain decoding does."""
    output = static(drafter_class, 120)
    assert torch.equal(output.sequences, kit.plain_greedy(setting()[0], PROMPT, 120))
    drafted = output.statistics.per_step_drafted
    assert graph.widths.count(BLOCK_SIZE) == drafted.count(BLOCK_SIZE - 1) > 10
    assert set(graph.widths) == ({BLOCK_SIZE, 1} if drafter_class is kit.HostileDrafter else {BLOCK_SIZE})
    if drafter_class is kit.HostileDrafter:
        assert graph.widths.count(1) > 40
        assert output.statistics.num_target_forwards - 1 - len(graph.widths) <= BLOCK_SIZE


def test_what_a_compiled_target_gives_out_is_not_kept(monkeypatch):
    """States, scores or feedback of one block that read what the next block's forward has written there."""

    class Keeps(AcceptanceProcessor):
        def __init__(self, kept):
            self.kept = kept

        def __deepcopy__(self, memo):
            return self

        def observe(self, draft, verification):
            self.kept.append((verification.raw_logits, verification.scores, verification.features))

    target, drafters = setting(torch.float32)  # whose logits need no cast, which would copy them
    graph, actual = Graph(target), []
    monkeypatch.setattr(target, "get_compiled_call", lambda config: graph, raising=False)
    for options in ({"disable_compile": True}, {}):
        kept: list = []
        options |= {"cache_implementation": "static", "compile_config": on_any_device(), **EVERYTHING}
        options["acceptance_processors"] = [Keeps(kept)]
        output = kit.decode(target, drafters[kit.NudgedDrafter], PROMPT, NEW_TOKENS, **options)
        states = [output[name] for name in ("scores", "logits", "hidden_states", "attentions")]
        actual.append((output.sequences, output.statistics.per_step_accepted, states, kept))
    assert len(graph.widths) > 4  # of the second call only
    assert torch.equal(actual[0][0], actual[1][0]) and actual[0][1] == actual[1][1]
    torch.testing.assert_close(actual[1][2], actual[0][2], atol=0, rtol=0)
    torch.testing.assert_close(actual[1][3], actual[0][3], atol=0, rtol=0)


@pytest.mark.parametrize(
    "options", [{"disable_compile": True}, {"compile_config": None}, {"cache_implementation": None}]
)
def test_not_compiled_where_plain_decoding_does_not(graph, options):
    """Minutes of compiling on a CPU, for a cache that changes its shape, or against `disable_compile`."""
    output = static(kit.PatternDrafter, **options)
    assert graph.widths == [] and output.sequences.shape[1] == PROMPT.shape[1] + NEW_TOKENS


@pytest.mark.parametrize("end", [0, 3, 9, 17])
def test_compiled_blocks_end_where_plain_text_ends(graph, end):
    """D1 on static caches: tokens or columns behind an EOS inside a compiled block."""
    target = setting()[0]
    eos = int(kit.plain_greedy(target, PROMPT, NEW_TOKENS)[0, PROMPT.shape[1] + end])
    options = {"eos_token_id": eos, "return_dict_in_generate": True}
    plain = kit.plain_greedy(target, PROMPT, NEW_TOKENS, cache_implementation="static", **options)
    output = static(kit.PatternDrafter, **options)
    assert torch.equal(output.sequences, plain.sequences)
    assert int(kit.cache_of(output).get_seq_length()) == output.sequences.shape[1] - 1


def test_rows_of_a_batch_share_the_compiled_forward(monkeypatch):
    """A batch on static caches goes row by row; each row with a graph of its own, or none."""
    rows, target = [0, 1, 3], target_of()
    made = Graph(target)
    monkeypatch.setattr(target, "get_compiled_call", lambda config: made, raising=False)
    drafter = following(kit.PatternDrafter, rows, NEW_TOKENS, pattern=PATTERN)
    output = generate(rows, drafter, NEW_TOKENS, cache_implementation="static", compile_config=on_any_device())
    assert [new_tokens_of(output, i, rows) for i in range(3)] == [plain_ids(row, NEW_TOKENS) for row in rows]
    assert len(made.widths) == output.statistics.per_step_drafted.count(BLOCK_SIZE - 1) > 10
    kit.assert_not_vacuous(output.statistics)


@pytest.mark.parametrize("verification", ["token", "block"])
def test_sampled_text_does_not_depend_on_compiling(graph, verification):
    """Logits that are overwritten between the acceptance test and the bonus."""
    target, drafters = setting()
    options = {"verification": verification, "cache_implementation": "static", "compile_config": on_any_device()}
    texts = [
        kit.decode(
            target, drafters[kit.NudgedDrafter], PROMPT, NEW_TOKENS, disable_compile=is_disabled, seeds=[3],
            **{**kit.SAMPLED, "temperature": 0.5}, **options,
        ).sequences
        for is_disabled in (True, False)
    ]  # fmt: skip
    assert torch.equal(*texts) and graph.widths
