"""What one call of the comparison does: a pair of models, options, and the output that is looked at."""

import hashlib
import json
import string
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer, decoders, models
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LogitsProcessor,
    PreTrainedTokenizerFast,
    StoppingCriteria,
)
from transformers.generation.streamers import BaseStreamer

import hf_dflow
from experiments.same_behaviour.models import NEW_TOKENS, export
from hf_dflow import DFlowDecoder, DFlowDrafter, DFlowGenerationConfig


@dataclass
class Pair:
    """Models and prompts of one target; prompts are lists of ids."""

    target: Any
    drafter: Any
    prompts: list[list[int]]
    tokenizer: Any
    new_tokens: int = NEW_TOKENS

    def inputs(self, *rows: int) -> dict[str, torch.Tensor]:
        """Ids and mask of some prompts, padded on the left."""
        prompts = [self.prompts[row] for row in rows]
        longest = max(map(len, prompts))
        ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        return {"input_ids": ids, "attention_mask": mask}


def tiny_tokenizer() -> Any:
    """One character for each token."""
    vocab = {character: i for i, character in enumerate(string.ascii_letters + string.digits + ".,")}
    model = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    model.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=model, clean_up_tokenization_spaces=False)


@cache
def tiny_pair(folder: Path, target: str, drafter: str = "own", attention: str = "sdpa") -> Pair:
    """A target of [`build`] and one of its drafters."""
    paths = folder / target / "target", folder / target / drafter
    dtype = torch.float64
    if target.startswith("gemma"):  # which has eager attention only, and that makes NaN of padding in float64
        attention, dtype = "eager", torch.float32
    loaded = AutoModelForCausalLM.from_pretrained(paths[0], dtype=dtype, attn_implementation=attention)
    ours = DFlowDrafter.from_pretrained(paths[1], dtype=dtype, attn_implementation="eager")
    return Pair(loaded.eval(), ours.eval(), json.loads((folder / "prompts.json").read_text()), tiny_tokenizer())


@cache
def bundled_pair(target: Path, drafter: Path, texts: tuple[str, ...], new_tokens: int) -> Pair:
    """A pair that the package ships, asked by chat messages."""
    tokenizer: Any = AutoTokenizer.from_pretrained(target)
    loaded = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    prompts = []
    for text in texts:
        message = [{"role": "user", "content": text}]
        prompts.append(
            tokenizer.apply_chat_template(message, add_generation_prompt=True, return_dict=True)["input_ids"]
        )
    return Pair(loaded.eval(), DFlowDrafter.from_pretrained(drafter).eval(), prompts, tokenizer, new_tokens)


def decode(
    get: Callable[[], Pair],
    *rows: int,
    extra: dict[str, Any] | None = None,
    custom: dict[str, Any] | None = None,
    **options: Any,
) -> Any:
    """Run one call on some prompts of a pair.

    Args:
        get (`Callable`): Returns the pair.
        rows (`int`): The prompts; several make a batch.
        extra (`dict`, *optional*): Arguments of `generate` itself.
        custom (`dict`, *optional*): Options of a `DFlowDecoder` to call in place of the flag.
        options: Fields of the configuration.
    """
    torch.manual_seed(7)
    pair = get()
    options = {"max_new_tokens": pair.new_tokens, "return_dict_in_generate": True, "pad_token_id": 0, **options}
    if options.get("do_sample"):
        options = {"temperature": 0.08, "top_k": 0, "top_p": 1.0, **options}
    arguments = {**pair.inputs(*rows), **(extra or {})}
    if custom is not None:
        return pair.target.generate(**arguments, **options, custom_generate=DFlowDecoder(pair.drafter, **custom))
    config = DFlowGenerationConfig(**options)
    return pair.target.generate(**arguments, assistant_model=pair.drafter, generation_config=config)


def without_our_options(get: Callable[[], Pair], *rows: int, **options: Any) -> Any:
    """A call without a configuration object of ours."""
    pair = get()
    options = {"assistant_model": pair.drafter, "max_new_tokens": NEW_TOKENS, **options}
    return pair.target.generate(**pair.inputs(*rows), **options)


class Counting(LogitsProcessor):
    """Keeps state: what it forbids depends on how often it was called."""

    def __init__(self):
        self.count = 0

    def __call__(self, input_ids, scores):
        self.count += 1
        return scores.index_fill(-1, scores[0].topk(3).indices[: self.count % 2], -torch.inf)


class EndsAt(StoppingCriteria):
    """Stops behind one token."""

    def __init__(self, token: int):
        self.token = token

    def __call__(self, input_ids, scores, **kwargs):
        return input_ids[:, -1] == self.token


class Recorder(BaseStreamer):
    def __init__(self):
        self.values: list[Any] = []

    def put(self, value):
        self.values.append(value.flatten().tolist())

    def end(self):
        self.values.append("end")


class Sharpening(hf_dflow.AcceptanceProcessor):
    """A draft law that conditions on the step before, and acceptance that is made easier."""

    def __init__(self, is_lossy: bool = False):
        self.is_lossy, self.seen = is_lossy, 0

    def adjust_draft_logits(self, draft_logits, feedback):
        return draft_logits * (1.0 if feedback is None else 1.0 + 0.1 * (self.seen % 3))

    def adjust_acceptance(self, context):
        return (context.acceptance_probs * 1.2).clamp(max=1.0)

    def observe(self, draft, verification):
        self.seen += 1


def after_prefill(get: Callable[[], Pair], row: int, cached: int) -> Any:
    """With a cache that already holds the first tokens of the prompt."""
    pair = get()
    ids = pair.inputs(row)["input_ids"][:, :cached]
    first = pair.target.generate(ids, max_new_tokens=1, do_sample=False, return_dict_in_generate=True, pad_token_id=0)
    return decode(get, row, extra=cache_argument(first))


def second_turn(get: Callable[[], Pair], row: int) -> Any:
    """A call that resumes from what the call before returned."""
    first = decode(get, row, max_new_tokens=9)
    ids = torch.cat([first.sequences, torch.tensor([get().prompts[0]])], dim=1)
    extra = {"input_ids": ids, "attention_mask": torch.ones_like(ids), **cache_argument(first)}
    return decode(get, row, extra=extra)


def cache_argument(output: Any) -> dict[str, Any]:
    """The returned cache under the name that this release of transformers has for it."""
    name = "cache" if "cache" in output else "past_key_values"
    return {name: output[name]}


def monitored(get: Callable[[], Pair], **options: Any) -> Any:
    """Three calls of one route: the last one's output, and the route's figures."""
    settings = hf_dflow.MonitorSettings(window=6, fewest_steps=3, probe_steps=2, first_pause=2, longest_pause=4)
    times = hf_dflow.StepTimes(draft=1.0, verify=2.0, plain=1.0)
    monitor = hf_dflow.AcceptanceMonitor(settings=settings, times=times)
    outputs = [decode(get, *rows, monitor=monitor.route("only"), **options) for rows in ((0,), (1, 2), (3,))]
    outputs[-1].also = [*(observe(output) for output in outputs), asdict(monitor.figures()[0])]
    return outputs[-1]


def streamed(get: Callable[[], Pair], **options: Any) -> Any:
    recorder = Recorder()
    output = decode(get, 1, extra={"streamer": recorder}, **options)
    output.also = recorder.values
    return output


def in_float32(get: Callable[[], Pair], *rows: int, **options: Any) -> Any:
    """In the precision that users have."""
    pair = get()
    pair.target.float()
    pair.drafter.float()
    try:
        return decode(get, *rows, **options)
    finally:
        tiny_pair.cache_clear()


def written(folder: Path, variant: str, layout: str | None) -> dict[str, Any]:
    """Configuration and weights of a drafter that this commit has written."""
    with tempfile.TemporaryDirectory() as scratch:
        output = Path(scratch) / "output"
        if layout is None:
            DFlowDrafter.from_pretrained(folder / "llama" / variant, dtype=torch.float64).save_pretrained(output)
        else:
            export(folder / "llama" / variant, layout, output)
        config = json.loads((output / "config.json").read_text())
        config.get("hf_dflow", {}).pop("version", None)
        config.pop("relay_top_k", None)  # which the package no longer has
        weights = {name: digest(value) for file in sorted(output.rglob("*.safetensors"))
                   for name, value in load_file(file).items()}  # fmt: skip
    return {"config": config, "weights": weights}


def digest(value: Any) -> Any:
    """Tensors as shape and hash, in whatever tuples they stand."""
    if isinstance(value, torch.Tensor):
        data = value.detach().cpu().contiguous()
        return [list(data.shape), hashlib.sha256(data.view(torch.uint8).numpy().tobytes()).hexdigest()[:16]]
    return [digest(part) for part in value] if isinstance(value, list | tuple) else value


def observe(output: Any) -> dict[str, Any]:
    """What one call gave, for JSON."""
    if isinstance(output, dict) and "sequences" not in output:
        return output
    if isinstance(output, torch.Tensor):
        return {"texts": output.tolist()}
    record: dict[str, Any] = {"texts": output.sequences.tolist(), "statistics": asdict(output.statistics)}
    for name in ("scores", "logits", "hidden_states", "attentions"):
        if output.get(name) is not None:
            record[name] = digest(output[name])
    held = next(iter(cache_argument(output).values())) if output.keys() & {"cache", "past_key_values"} else None
    record["cached"] = None if held is None else int(held.get_seq_length())
    if hasattr(output, "also"):
        record["also"] = output.also
    return record
