"""Tiny targets of several families, drafters for them, and what the tests ask of both."""

import copy
import string
from functools import cache
from pathlib import Path

import torch
from scripted_drafters import (  # noqa: F401 - tests take all of the kit from here
    HostileDrafter,
    NudgedDrafter,
    OracleDrafter,
    PatternDrafter,
    ScriptedDrafter,
    TurnsGood,
    scripted_steps,
)
from tokenizers import Tokenizer, decoders, models
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Phi3Config,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
)
from transformers.generation import GenerationMixin
from transformers.generation.streamers import BaseStreamer

from hf_dflow import AcceptanceStatistics, DFlowDrafter, DFlowDrafterConfig, DFlowGenerationConfig

ROOT = Path(__file__).parents[1]  # of the repository
VOCAB_SIZE = 64
HIDDEN_SIZE = 32
MASK_TOKEN_ID = VOCAB_SIZE - 1
WINDOW = 8  # of the sliding families: shorter than every test's context
WEIGHT_STD = 0.3  # standard deviation of weights: with the usual 0.02 a tiny model repeats one token for ever
FAMILIES = ("llama", "qwen3", "gpt2", "gemma", "gemma_sliding", "mistral_sliding")
ROPE = {"rope_type": "default", "rope_theta": 10000.0}


def _target_config(family: str, **overrides):
    common = {
        "vocab_size": VOCAB_SIZE,
        "initializer_range": WEIGHT_STD,
        "pad_token_id": 0,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    modern = {
        **common,
        "hidden_size": HIDDEN_SIZE,
        "intermediate_size": 48,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 256,
        "rope_parameters": dict(ROPE),
        "tie_word_embeddings": False,
    }
    if family == "llama":
        return LlamaConfig(**{**modern, **overrides})
    if family == "qwen3":
        return Qwen3Config(**{**modern, "tie_word_embeddings": True, "initializer_range": 2 * WEIGHT_STD, **overrides})
    if family == "gpt2":
        gpt2 = {"n_embd": HIDDEN_SIZE, "n_layer": 3, "n_head": 4, "n_positions": 256, "tie_word_embeddings": False}
        return GPT2Config(**{**common, **gpt2, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, **overrides})
    if family in ("gemma", "gemma_sliding"):
        gemma = {
            "query_pre_attn_scalar": 8,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
            "sliding_window": WINDOW if family == "gemma_sliding" else 4096,
        }
        return Gemma2Config(**{**modern, **gemma, **overrides})
    if family == "mistral_sliding":
        return MistralConfig(**{**modern, "sliding_window": WINDOW, **overrides})
    # Only where a test names them.
    if family == "phi3":
        return Phi3Config(**{**{name: value for name, value in modern.items() if name != "head_dim"}, **overrides})
    experts = {"num_experts_per_tok": 2, "moe_intermediate_size": 24}
    if family == "mixtral":
        return MixtralConfig(**{**modern, "num_experts_per_tok": 2, "num_local_experts": 4, **overrides})
    if family == "qwen3_moe":
        return Qwen3MoeConfig(**{**modern, **experts, "num_experts": 4, **overrides})
    if family == "qwen3_next":
        heads = {"linear_num_value_heads": 2, "linear_num_key_heads": 2}
        linear = {**heads, "linear_key_head_dim": 8, "linear_value_head_dim": 8, "shared_expert_intermediate_size": 24}
        layers = ["linear_attention", "full_attention"] * 2
        return Qwen3NextConfig(**{**modern, **experts, **linear, "num_experts": 4, "layer_types": layers, **overrides})
    raise ValueError(f"unknown family {family!r}; known: {', '.join(FAMILIES)}")


def tiny_target(
    family: str = "llama",
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float64,
    attention: str = "eager",
    **overrides,
):
    """A random causal language model of `family`, on CPU; `overrides` are config fields.

    Padded prompts need "sdpa" (or float32): the eager softmax runs in float32, where the float64 mask's lowest value
    is -inf, and a row that sees nothing becomes NaN.

    Heads are untied but for Qwen3's, because most tiny tied models only repeat themselves.

    It never says `MASK_TOKEN_ID`, which no drafter may propose, so that an oracle can propose everything it says.
    """
    config = _target_config(family, **overrides)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        target = AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    with torch.no_grad():
        target.get_output_embeddings().weight[MASK_TOKEN_ID] *= 0.01
    target.generation_config.pad_token_id = 0
    return target.to(dtype).eval().requires_grad_(False)


def tiny_drafter(
    target: PreTrainedModel,
    block_size: int = 8,
    relay: str | None = "random",
    *,
    drafter_class: type[DFlowDrafter] = DFlowDrafter,
    seed: int = 1,
    dtype: torch.dtype | None = None,
    **overrides,
) -> DFlowDrafter:
    """A drafter that fits `target`, in the target's dtype; `overrides` are config fields.

    Args:
        relay (`str`, *optional*): "random": weights large enough to change drafts; "zero": as initialised; None: no
            relay weights at all.
    """
    text_config = target.config.get_text_config()
    fields = {
        "vocab_size": text_config.vocab_size,
        "hidden_size": text_config.hidden_size,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 512,
        "rope_parameters": dict(ROPE),
        "layer_types": ["full_attention"] * 2,
        "block_size": block_size,
        "mask_token_id": MASK_TOKEN_ID,
        "target_layer_ids": [0, text_config.num_hidden_layers - 2],
        "num_target_layers": text_config.num_hidden_layers,
        "initializer_range": WEIGHT_STD,
        "use_relay": relay is not None,
    }
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        config = DFlowDrafterConfig(**{**fields, **overrides})
        drafter = drafter_class._from_config(config, attn_implementation="eager")
        if relay == "random":
            with torch.no_grad():
                drafter.relay.down_proj.weight.normal_(0.0, WEIGHT_STD)
                drafter.relay.down_proj.bias.normal_(0.0, WEIGHT_STD)
    return drafter.to(dtype or target.dtype).eval().requires_grad_(False)


@cache
def shared_target(family: str = "llama", **overrides) -> PreTrainedModel:
    """`tiny_target` of these arguments, built once in a process. No test may change it."""
    return _remember(tiny_target(family, **overrides))


@cache
def shared_drafter(
    family: str = "llama", block_size: int = 8, relay: str | None = "random", **overrides
) -> DFlowDrafter:
    """`tiny_drafter` for the shared target of `family`, built once in a process. No test may change it."""
    return _remember(tiny_drafter(shared_target(family), block_size, relay, **overrides))


def weights_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """A copy of the weights, for `assert_weights`."""
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def assert_weights(model: nn.Module, weights: dict[str, torch.Tensor]) -> None:
    """`model` has exactly these weights."""
    now = model.state_dict()
    assert now.keys() == weights.keys()
    changed = [name for name in weights if not torch.equal(now[name], weights[name])]
    assert not changed, f"a test or a call changed {', '.join(changed)} of a {type(model).__name__}"


_SHARED: list[tuple[PreTrainedModel, dict, tuple]] = []  # models, their weights and their settings when they were built


def _remember(model):
    _SHARED.append((model, weights_of(model), _settings(model)))
    return model


def _settings(model) -> tuple:
    return copy.deepcopy((model.config.to_dict(), model.generation_config.to_dict() if model.can_generate() else None))


def assert_shared_models_unchanged() -> None:
    """No test has changed a shared model's weights, configuration or generation settings."""
    for model, weights, settings in _SHARED:
        assert _settings(model) == settings, f"a test changed the settings of a shared {type(model).__name__}"
        assert_weights(model, weights)


def plain_greedy(target, input_ids: torch.Tensor, max_new_tokens: int, **kwargs):
    """Plain greedy text: `[B, T + max_new_tokens]`, or the output object with `return_dict_in_generate`.

    Without options, a shared target computes each text once in a process.
    """
    if not kwargs and any(target is model for model, _, _ in _SHARED):
        return _shared_text(target, tuple(map(tuple, input_ids.tolist())), max_new_tokens).clone()
    return target.generate(input_ids, max_new_tokens=max_new_tokens, do_sample=False, **kwargs)


@cache
def _shared_text(target, rows: tuple[tuple[int, ...], ...], max_new_tokens: int) -> torch.Tensor:
    return target.generate(torch.tensor(rows), max_new_tokens=max_new_tokens, do_sample=False)


# Arguments of generate that are no fields of its configuration.
_NO_FIELDS = (
    "attention_mask", "cache", "logits_processor", "negative_prompt_ids", "past_key_values", "pixel_values",
    "prefix_allowed_tokens_fn", "stopping_criteria", "streamer", "tokenizer",
)  # fmt: skip
SAMPLED = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}  # the target's own law, unwarped


def decode(target, drafter, input_ids: torch.Tensor, max_new_tokens: int, **options):
    """The output object of a call with a [`DFlowGenerationConfig`] of `options`; greedy unless they say otherwise."""
    arguments = {name: options.pop(name) for name in _NO_FIELDS if name in options}
    fields = {"do_sample": False, "return_dict_in_generate": True, "pad_token_id": 0, "max_new_tokens": max_new_tokens}
    config = DFlowGenerationConfig(**{**fields, **options})
    return target.generate(input_ids, assistant_model=drafter, generation_config=config, **arguments)


def dflow_greedy(target, drafter, input_ids: torch.Tensor, **kwargs):
    """The output object of a greedy `speculation_type="dflow"` call."""
    kwargs.setdefault("return_dict_in_generate", True)
    return target.generate(input_ids, assistant_model=drafter, speculation_type="dflow", do_sample=False, **kwargs)


def prompt_of(length: int, seed: int = 0) -> torch.Tensor:
    """A random prompt `[1, length]` without padding and mask ids."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, MASK_TOKEN_ID, (1, length), generator=generator)


def varied_prompt(target, count: int, length: int = 12, first_seed: int = 0) -> torch.Tensor:
    """A prompt after which the first `count` tokens of plain greedy text differ, so that each can be made the EOS.

    The search costs some seconds where such prompts are rare; `first_seed` says where to begin.
    """
    for seed in range(first_seed, first_seed + 200):
        prompt = prompt_of(length, seed)
        text = plain_greedy(target, prompt, count)[0, length:].tolist()
        if len(set(text)) == count:
            return prompt
    raise ValueError(f"no prompt gives {count} different tokens")


# What this release of transformers calls a target's cache among the arguments of generate.
CACHE = "cache" if "cache" in GenerationMixin.prepare_inputs_for_generation.__annotations__ else "past_key_values"


def cache_of(output):
    """The returned cache, whatever this release of transformers calls it."""
    return output["cache"] if "cache" in output else output["past_key_values"]


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """One character for each of the 64 tokens, built on the spot."""
    vocab = {character: i for i, character in enumerate(string.ascii_letters + string.digits + ".,")}
    model = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    model.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=model, clean_up_tokenization_spaces=False)


class RecordingStreamer(BaseStreamer):
    """Keeps every call."""

    def __init__(self):
        self.puts: list[list[int]] = []
        self.ends = 0

    def put(self, value):
        self.puts.append(value.flatten().tolist())

    def end(self):
        self.ends += 1


def our_warnings(caplog) -> list[str]:
    """What the package has logged as warnings."""
    return [record.getMessage() for record in caplog.records if record.name.startswith("hf_dflow")]


class FakeQuantized(nn.Module):
    """A head of which only `forward` can be used."""

    def __init__(self, dense: nn.Linear):
        super().__init__()
        self._hidden = [dense]

    def forward(self, states):
        return self._hidden[0](states)


class ContextRecorder:
    """Keeps the context features that a drafter without relay (which projects its own) is given, in order."""

    def __init__(self, drafter: DFlowDrafter):
        self.rows = []
        inner = drafter.project_context

        def project_context(features):
            self.rows.append(features)
            return inner(features)

        drafter.project_context = project_context


def scripted(
    drafter_class: type[ScriptedDrafter],
    target,
    input_ids: torch.Tensor,
    max_new_tokens: int,
    *,
    block_size: int = 8,
    pattern: list[int] | None = None,
    **overrides,
) -> ScriptedDrafter:
    """A scripted drafter that follows `target`'s own greedy text after `input_ids` `[1, T]` (given without padding).

    The text is a block longer than `max_new_tokens`, so that drafts past the end are right as well. Tests that run
    many drafters over one text build them with `tiny_drafter` and `follow` instead.
    """
    drafter = tiny_drafter(target, block_size, drafter_class=drafter_class, **overrides)
    if pattern is not None:
        drafter.pattern = pattern
    text = plain_greedy(target, input_ids, max_new_tokens + block_size)
    return drafter.follow(text, input_ids.shape[1])


def assert_not_vacuous(statistics: AcceptanceStatistics) -> None:
    """A block with two or more accepted drafts (one where blocks hold one draft) and a partial rejection happened.

    The last step does not count as a rejection: the end of the text may have cut it.
    """
    steps = list(zip(statistics.per_step_accepted, statistics.per_step_drafted, strict=True))
    several = min(2, max(drafted for _, drafted in steps))
    assert any(accepted >= several for accepted, _ in steps), f"no block with {several} accepted drafts: {steps}"
    least = 1 if several == 2 else 0
    rejected = [accepted for accepted, drafted in steps[:-1] if accepted < drafted]
    assert any(accepted >= least for accepted in rejected), f"no partial rejection: {steps}"
