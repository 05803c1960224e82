"""Every call of the comparison, by group. A pair is loaded at its first use."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from transformers import LogitsProcessorList, StoppingCriteriaList

import hf_dflow
from experiments.same_behaviour.models import EXPORTS, NEW_TOKENS, TARGETS, VARIANTS, plain_text
from experiments.same_behaviour.pairs import (
    Counting,
    EndsAt,
    Pair,
    Recorder,
    Sharpening,
    after_prefill,
    bundled_pair,
    decode,
    in_float32,
    monitored,
    second_turn,
    streamed,
    tiny_pair,
    without_our_options,
    written,
)

GetPair = Callable[..., Pair]
FULL_ATTENTION = ("llama", "qwen3", "gpt2")
COSTS = {"draft": 0.4, "verify": [1.0 + 0.06 * i for i in range(65)]}
SAMPLED: dict[str, Any] = {"do_sample": True}
TOKEN, BLOCK = ({**SAMPLED, "verification": rule} for rule in ("token", "block"))
WARM: dict[str, Any] = {"temperature": 0.3}
ADAPTIVE: dict[str, Any] = {"adaptive_length": True, "step_costs": COSTS}
STATIC: dict[str, Any] = {"cache_implementation": "static"}
STATES: dict[str, Any] = {"output_scores": True, "output_logits": True, "output_hidden_states": True}
AIRPORTS = ("BLG OVS WTS TYS XKS KRT", "ZRE MSL RKD ZAD MLB DEM", "DSD GDX CEY CPQ OHR RIJ")
QUESTIONS = (
    "Write a Python function that returns the n-th Fibonacci number.",
    "Explain in two sentences why the sky is blue.",
    "List three uses of a paper clip.",
)


@dataclass
class Call:
    """A group, a name, and what to run."""

    group: str
    name: str
    run: Callable[[], Any]


def all_calls(folder: Path, smollm2: str | None) -> Iterator[Call]:
    """Every call on the models in `folder` and on the bundled pairs; `smollm2` is the folder of the larger target."""
    for family in TARGETS:
        yield from family_calls(family, partial(tiny_pair, folder, family))
    llama = partial(tiny_pair, folder, "llama")
    yield from ends_of_text(llama)
    yield from processors_and_criteria(llama)
    yield from returned_states(llama)
    yield from ways_in(llama)
    for drafter in (*VARIANTS, "native", *EXPORTS):
        yield from drafter_calls(drafter, partial(tiny_pair, folder, "llama", drafter))
    for drafter, layout in (("own", None), *EXPORTS.values()):
        yield Call("written formats", f"{drafter} as {layout}", partial(written, folder, drafter, layout))
    yield from refused_calls(llama)
    drafters = Path(hf_dflow.__file__).parent / "drafters"
    tiny, requests = drafters / "tiny-airports-b8", tuple(f"airports {codes} :" for codes in AIRPORTS)
    yield from bundled_calls("tiny-airports", partial(bundled_pair, tiny / "target", tiny / "drafter", requests, 40))
    if smollm2 is not None:
        drafter_folder = drafters / "smollm2-135m-instruct-b8"
        yield from bundled_calls("SmolLM2-135M", partial(bundled_pair, Path(smollm2), drafter_folder, QUESTIONS, 24))


def family_calls(family: str, pair: GetPair) -> Iterator[Call]:
    modes: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
        **{f"greedy, prompt {row}": ((row,), {}) for row in range(4)},
        "greedy without relay": ((1,), {"use_relay": False}),
        "greedy, 3 drafts": ((1,), {"num_draft_tokens": 3}),
        "greedy batch": ((0, 1, 2, 3), {}),
        "greedy batch, 3 drafts": ((2, 3), {"num_draft_tokens": 3}),
        "sampled, token": ((1,), TOKEN),
        "sampled, block": ((1,), BLOCK),
        "sampled warmer, token": ((3,), TOKEN | WARM),
        "sampled warmer, block": ((3,), BLOCK | WARM),
        "sampled batch with seeds": ((0, 1, 2, 3), {**SAMPLED, "seeds": [3, 1, 4, 1]}),
        "sampled batch, top-k and top-p": ((0, 3), {**TOKEN, "top_k": 12, "top_p": 0.9}),
        "adaptive, greedy": ((1,), ADAPTIVE),
        "adaptive, sampled batch": ((0, 1, 2), SAMPLED | ADAPTIVE),
        "mixture, greedy": ((3,), {"stale_mixture": True}),
        "mixture, sampled batch": ((0, 1, 2), {**SAMPLED, "stale_mixture": 0.3}),
        "prompt in chunks": ((3,), {"prefill_chunk_size": 6}),
        "prompts in chunks": ((1, 2, 3), {"prefill_chunk_size": 6}),
    }
    if family in FULL_ATTENTION:
        modes |= {
            "static cache": ((1,), STATIC),
            "static cache, batch": ((0, 1, 3), STATIC),
            "static cache, sampled": ((3,), STATIC | SAMPLED),
            "tree of 5": ((1,), {"tree_budget": 5}),
            "tree of 24": ((0,), {"tree_budget": 24}),
            "tree by costs": ((1,), {"tree_budget": "auto", "step_costs": COSTS}),
        }
    for name, (rows, options) in modes.items():
        yield Call(family, name, partial(decode, pair, *rows, **options))
    yield Call(family, "filled cache", partial(after_prefill, pair, 3, 9))
    yield Call(family, "second turn", partial(second_turn, pair, 1))
    yield Call(family, "monitor", partial(monitored, pair))
    yield Call(family, "monitor, sampled", partial(monitored, pair, **SAMPLED))


def text_of(pair: GetPair, row: int) -> list[int]:
    """What the target says to prompt `row` alone."""
    prompt = pair().prompts[row]
    return plain_text(pair().target, prompt, NEW_TOKENS)[0, len(prompt) :].tolist()


def ends_of_text(pair: GetPair) -> Iterator[Call]:
    def ending(place: int, *rows: int, **options: Any) -> Any:
        """With what each row says at `place` and a few tokens later as EOS."""
        ends = [text_of(pair, row)[place + 4 * i] for i, row in enumerate(rows)]
        return decode(pair, *rows, eos_token_id=ends, **options)

    for place in range(2, 18, 2):
        yield Call("ends of text", f"EOS at {place}", partial(ending, place, 1))
        yield Call("ends of text", f"EOS at {place}, batch", partial(ending, place, 0, 1, 3))
    others = {"sampled": SAMPLED, "static cache": STATIC, "minimum length": {"min_new_tokens": 12}}
    for name, options in others.items():
        yield Call("ends of text", f"EOS, {name}", partial(ending, 5, 1, **options))
    for length in (1, 2, 3, 5):
        yield Call("ends of text", f"{length} tokens", partial(decode, pair, 1, max_new_tokens=length))


def processors_and_criteria(pair: GetPair) -> Iterator[Call]:
    def stop_string() -> dict[str, Any]:
        tokenizer = pair().tokenizer
        return {"stop_strings": [tokenizer.decode(text_of(pair, 1)[9:11])], "extra": {"tokenizer": tokenizer}}

    def criterion() -> dict[str, Any]:
        return {"extra": {"stopping_criteria": StoppingCriteriaList([EndsAt(text_of(pair, 1)[11])])}}

    def grammar() -> dict[str, Any]:
        def allowed(_, ids):
            return [token for token in range(1, 62) if (token + int(ids[-1])) % 4]

        return {"extra": {"prefix_allowed_tokens_fn": allowed}}

    makers: dict[str, Callable[[], dict[str, Any]]] = {
        "stop string": stop_string,
        "criterion": criterion,
        "grammar": grammar,
        "stateful processor": lambda: {"extra": {"logits_processor": LogitsProcessorList([Counting()])}},
        "penalty": lambda: {"repetition_penalty": 1.05},
        "no repeats": lambda: {"no_repeat_ngram_size": 3},
        "forbidden words": lambda: {"bad_words_ids": [[5], [9]], "renormalize_logits": True},
    }

    def run(make: Callable[[], dict[str, Any]], *rows: int, **options: Any) -> Any:
        return decode(pair, *rows, **make(), **options)

    for name, make in makers.items():
        for rows in ((1,), (0, 1, 3)):
            yield Call("processors and criteria", f"{name}, rows {rows}", partial(run, make, *rows))
            yield Call("processors and criteria", f"{name}, sampled, rows {rows}", partial(run, make, *rows, **SAMPLED))


def returned_states(pair: GetPair) -> Iterator[Call]:
    eager, group = partial(pair, attention="eager"), "returned states"
    alone: dict[str, dict[str, Any]] = {
        "greedy": {},
        "sampled": SAMPLED,
        "penalty": {"repetition_penalty": 1.2},
        "EOS": {"eos_token_id": 5},
    }
    for name, options in alone.items():
        yield Call(group, name, partial(decode, eager, 1, output_attentions=True, **STATES, **options))
    yield Call(group, "in chunks", partial(decode, eager, 3, prefill_chunk_size=6, **STATES))
    yield Call(group, "batch", partial(decode, pair, 0, 1, 3, **STATES))
    yield Call(group, "batch, sampled", partial(decode, pair, 0, 1, 3, **STATES, **SAMPLED))


def ways_in(pair: GetPair) -> Iterator[Call]:
    def relaxed(*rows: int, is_lossy: bool, **options: Any) -> Any:
        return decode(pair, *rows, acceptance_processors=[Sharpening(is_lossy)], **options)

    for kind, options in {"greedy": {}, "sampled": SAMPLED}.items():
        runs = {
            "streamer": partial(streamed, pair, **options),
            "custom_generate": partial(decode, pair, 1, custom={"num_draft_tokens": 6}, **options),
            "custom_generate, batch": partial(decode, pair, 0, 3, custom={"stale_mixture": 0.2}, **options),
            "acceptance processor": partial(relaxed, 0, 1, is_lossy=False, **options),
            "lossy acceptance processor": partial(relaxed, 1, is_lossy=True, **options),
            "threshold": partial(decode, pair, 0, 1, acceptance_threshold=0.05, **options),
            "float32": partial(in_float32, pair, 0, 1, 3, **options),
            "plain output": partial(decode, pair, 0, 1, return_dict_in_generate=False, **options),
        }
        for name, run in runs.items():
            yield Call("ways in", f"{name}, {kind}", run)
    flags: dict[str, dict[str, Any]] = {
        "keywords alone": {"speculation_type": "dflow", "return_dict_in_generate": True, "do_sample": False},
        "transformers' DFlash loop": {"speculation_type": "dflash"},
        "no drafter": {"assistant_model": None, "do_sample": False},
    }
    for name, given in flags.items():
        yield Call("ways in", name, partial(without_our_options, pair, 1, **given))


def drafter_calls(drafter: str, pair: GetPair) -> Iterator[Call]:
    group = "drafters" if drafter in VARIANTS else "formats"
    modes: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
        "greedy": ((1,), {}),
        "greedy batch": ((0, 1, 2, 3), {}),
        "sampled": ((3,), SAMPLED),
        "sampled batch, token": ((0, 1, 3), {**TOKEN, "seeds": [5, 6, 7]}),
        "adaptive": ((1,), ADAPTIVE),
        "tree": ((1,), {"tree_budget": 16}),
        "mixture": ((1,), {"stale_mixture": True}),
    }
    if drafter == "correction":
        modes["switched off"] = ((1,), {"use_correction": False})
    if drafter == "fitted":
        learned = {"stale_mixture": "learned"}
        modes["learned mixture"] = ((1,), learned)
        modes["learned mixture, sampled, adaptive"] = ((0, 1, 3), learned | SAMPLED | ADAPTIVE)
    for name, (rows, options) in modes.items():
        yield Call(group, f"{drafter}, {name}", partial(decode, pair, *rows, **options))


def bundled_calls(name: str, pair: GetPair) -> Iterator[Call]:
    warm = {"temperature": 0.8}
    modes: dict[str, dict[str, Any]] = {
        "greedy": {},
        "sampled, block": BLOCK | warm,
        "sampled, token": TOKEN | warm,
        "adaptive": ADAPTIVE,
        "tree": {"tree_budget": 16},
        "mixture": {"stale_mixture": True},
    }
    for mode, options in modes.items():
        for row in range(3):
            yield Call(name, f"{mode}, prompt {row}", partial(decode, pair, row, **options))
    for mode, options in {"greedy": {}, "sampled": SAMPLED | warm, "static": STATIC}.items():
        yield Call(name, f"{mode} batch", partial(decode, pair, 0, 1, 2, **options))


def refused_calls(pair: GetPair) -> Iterator[Call]:
    """Only the kind of the error is compared; its words may change."""
    options: dict[str, dict[str, Any]] = {
        "beams": {"num_beams": 2},
        "no cache": {"use_cache": False},
        "too many drafts": {"num_draft_tokens": 99},
        "no such rule": {"verification": "none"},
        "costs too short": {"adaptive_length": True, "step_costs": {"draft": 1.0, "verify": [1.0]}},
        "tree and adaptive": {"tree_budget": 4, "adaptive_length": True},
        "tree that samples": {"tree_budget": 4, "do_sample": True},
        "mixture out of range": {"stale_mixture": 2.0},
        "nothing fitted": {"stale_mixture": "learned"},
        "no correction": {"use_correction": True},
        "threshold out of range": {"acceptance_threshold": 2.0},
        "lossy block": {"acceptance_threshold": 0.5, "verification": "block", "do_sample": True},
        "seeds": {"seeds": [-1]},
        "backend": {"kernel_backend": "none"},
        "offloaded cache": {"cache_implementation": "offloaded"},
    }
    for name, given in options.items():
        yield Call("refused", name, partial(decode, pair, 1, **given))
    yield Call("refused", "streamed batch", partial(decode, pair, 0, 1, extra={"streamer": Recorder()}))
    yield Call("refused", "tree of a batch", partial(decode, pair, 0, 1, tree_budget=4))
