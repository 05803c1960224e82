"""The tiny models of the comparison: random targets, and drafters that know most of what these say to four prompts.

Only public names of `hf_dflow` are used, so that any commit can make and load them.
"""

import json
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    MuseGlimmerAssistantConfig,
    MuseGlimmerAssistantModel,
)
from typer.testing import CliRunner

from hf_dflow import DFlowDrafter, DFlowDrafterConfig
from hf_dflow.cli import app

VOCAB_SIZE, HIDDEN_SIZE, MASK_TOKEN_ID, BLOCK_SIZE, WINDOW = 64, 32, 63, 8, 8
NEW_TOKENS = 28
PROMPT_LENGTHS = (7, 12, 3, 20)
ROPE: dict[str, Any] = {"rope_type": "default", "rope_theta": 10000.0}
COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
}
MODERN: dict[str, Any] = {
    **COMMON,
    "hidden_size": HIDDEN_SIZE,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "rope_parameters": ROPE,
    "tie_word_embeddings": False,
}  # fmt: skip
GEMMA = {**MODERN, "query_pre_attn_scalar": 8, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
GPT2 = {**COMMON, "n_embd": HIDDEN_SIZE, "n_layer": 3, "n_head": 4, "n_positions": 256, "tie_word_embeddings": False}
TARGETS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", MODERN),
    "qwen3": ("qwen3", {**MODERN, "tie_word_embeddings": True, "initializer_range": 0.6}),
    "gpt2": ("gpt2", {**GPT2, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}),
    "gemma": ("gemma2", {**GEMMA, "sliding_window": 4096}),
    "gemma-sliding": ("gemma2", {**GEMMA, "sliding_window": WINDOW}),
    "mistral-sliding": ("mistral", {**MODERN, "sliding_window": WINDOW}),
}
FITTED = {
    "mixture": [-2.0, 0.5, 0.3, -0.2, 0.4, 0.1, -0.3, 0.2],
    "calibration": {"greedy": [[0.2, 0.9], [0.1, 0.8], [0.0, 0.7]], "sampled": [[0.1, 0.7], [0.0, 0.6], [-0.1, 0.5]]},
    "row_precision": {"greedy": 5.0, "sampled": 3.0},
}
DFLASH2 = {"conv_kernel_size": 3, "conv_group_size": 8, "selector_rank": 6, "selector_top_k": 5}
SLIDING: dict[str, Any] = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": WINDOW}
SPOKEN = list(range(48))  # what a drafter with a head of its own can say
# Drafters for the tiny Llama beside the plain one: what its configuration changes.
VARIANTS: dict[str, dict[str, Any]] = {
    "no-relay": {"use_relay": False},
    "correction": {"correction_intermediate_size": 16, "correction_top_k": 8},
    "dflash2": {**DFLASH2, "use_relay": False},
    "from-anchor": {"sample_from_anchor": True, **SLIDING, "window_from_anchor": True},
    "own-head": {"output_head": "own", "draft_vocab_size": len(SPOKEN)},
    "sliding": {**SLIDING, "sliding_is_causal": True},
    "fitted": {"fitted_decisions": FITTED},
    "defaults": {"generation_defaults": {"num_draft_tokens": 4, "stale_mixture": 0.3}},
}
EXPORTS = {  # folder: the drafter behind it and the layout it is written in
    "as-dflash": ("sliding", "dflash"),
    "as-dflash2": ("dflash2", "dflash"),
    "as-speculators": ("own-head", "speculators"),
    "as-speculators-from-anchor": ("from-anchor", "speculators"),
    "as-speculators-dflash2": ("dflash2", "speculators"),
}


def build(folder: Path) -> None:
    """Random targets, and drafters that know most of what these say to four prompts."""
    prompts = [
        torch.randint(1, MASK_TOKEN_ID, (1, length), generator=torch.Generator().manual_seed(length)).tolist()[0]
        for length in PROMPT_LENGTHS
    ]
    (folder / "prompts.json").write_text(json.dumps(prompts))
    for name, (model_type, fields) in TARGETS.items():
        torch.manual_seed(0)
        target: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **fields)).double().eval()
        with torch.no_grad():  # it never says the mask token, which no drafter may propose
            target.get_output_embeddings().weight[MASK_TOKEN_ID] *= 0.01
        target.save_pretrained(folder / name / "target")
        texts = [plain_text(target, prompt, NEW_TOKENS + BLOCK_SIZE) for prompt in prompts]
        _make_drafter(folder / name / "own", target, texts, {})
        if name == "llama":
            for variant, changes in VARIANTS.items():
                _make_drafter(folder / name / variant, target, texts, changes)
            _make_native(folder / name / "native", target, texts)
            for exported, (variant, layout) in EXPORTS.items():
                export(folder / name / variant, layout, folder / name / exported)


def plain_text(target: Any, prompt: list[int], count: int) -> torch.Tensor:
    """Prompt and greedy continuation `[1, T + count]`."""
    return target.generate(torch.tensor([prompt]), max_new_tokens=count, do_sample=False, pad_token_id=0)


def _make_drafter(folder: Path, target: Any, texts: list[torch.Tensor], changes: dict[str, Any]) -> None:
    text_config = target.config.get_text_config()
    fields = {
        **{
            name: MODERN[name] for name in ("num_attention_heads", "num_key_value_heads", "head_dim", "rope_parameters")
        },
        **{
            name: MODERN[name] for name in ("vocab_size", "hidden_size", "intermediate_size", "max_position_embeddings")
        },
        "num_hidden_layers": 2,
        "layer_types": ["full_attention"] * 2,
        "block_size": BLOCK_SIZE,
        "mask_token_id": MASK_TOKEN_ID,
        "target_layer_ids": [0, text_config.num_hidden_layers - 2],
        "num_target_layers": text_config.num_hidden_layers,
        "initializer_range": 0.3,
    }
    torch.manual_seed(1)
    config = DFlowDrafterConfig(**{**fields, **changes})
    drafter: Any = DFlowDrafter._from_config(config, attn_implementation="eager").double()
    with torch.no_grad():
        for name, weight in drafter.named_parameters():
            if not weight.any():  # relay, correction and convolutions start as if they were not there
                weight.normal_(0.0, 0.01)
            elif name.startswith("candidate_selector"):
                weight.mul_(0.3)
        if drafter.draft_token_ids is not None:
            drafter.draft_token_ids.copy_(torch.tensor(SPOKEN))
    _memorize(drafter, target, texts)
    drafter.save_pretrained(folder)


def _make_native(folder: Path, target: Any, texts: list[torch.Tensor]) -> None:
    """A drafter of transformers' own DFlash."""
    names = ("hidden_size", "intermediate_size", "num_attention_heads", "head_dim", "initializer_range")
    fields: dict[str, Any] = {name: MODERN[name] for name in names}
    torch.manual_seed(2)
    config = MuseGlimmerAssistantConfig(
        **fields, num_key_value_heads=2, num_hidden_layers=2, max_position_embeddings=256, rms_norm_eps=1e-6,
        rope_parameters=ROPE, block_size=BLOCK_SIZE, mask_token_id=MASK_TOKEN_ID,
        target_layer_ids=[0, target.config.num_hidden_layers - 2], **SLIDING,
    )  # fmt: skip
    native: Any = MuseGlimmerAssistantModel._from_config(config, attn_implementation="eager").double()
    native.save_pretrained(folder)
    drafter: Any = DFlowDrafter.from_pretrained(folder, attn_implementation="eager", dtype=torch.float64)
    _memorize(drafter, target, texts)
    back = {"fc.weight": "encoder.fc.weight", "hidden_norm.weight": "encoder.output_norm_enc.weight"}
    native.load_state_dict({back.get(name, name): value for name, value in drafter.state_dict().items()})
    native.save_pretrained(folder)


def export(drafter: Path, layout: str, output: Path) -> None:
    result = CliRunner().invoke(app, ["export", str(drafter), str(output), "--to", layout])
    if result.exit_code:
        raise RuntimeError(result.output)


def _memorize(drafter: Any, target: Any, texts: list[torch.Tensor], updates: int = 80) -> None:
    """Fit what the drafter proposes behind each anchor of `texts`; at one position in six it learns a wrong token.

    Uses the forward that transformers' own DFlash loop calls, so relay and correction stay random and disturb it.
    """
    config, first = drafter.config, 0 if drafter.config.sample_from_anchor else 1
    longest = max(text.shape[1] for text in texts)
    features, noise, labels, visible, positions = [], [], [], [], []
    embedding = target.get_input_embeddings()
    for text, length in zip(texts, PROMPT_LENGTHS, strict=True):
        with torch.no_grad():
            states = target(text, output_hidden_states=True).hidden_states
            tapped = torch.cat([states[i + 1] for i in config.target_layer_ids], dim=-1)[0]
        is_wrong = torch.rand(text.shape[1], generator=torch.Generator().manual_seed(0)) < 1 / 6
        learned = torch.where(is_wrong, (text[0] + 1) % MASK_TOKEN_ID, text[0])
        for anchor in range(length, text.shape[1] - BLOCK_SIZE):
            pad = longest - anchor
            features.append(torch.nn.functional.pad(tapped[:anchor], (0, 0, pad, 0)))
            block = torch.full((BLOCK_SIZE,), MASK_TOKEN_ID)
            block[0] = text[0, anchor]
            noise.append(embedding.weight[block].detach())
            rows = torch.arange(anchor, anchor + BLOCK_SIZE)
            labels.append(learned[rows[first:] + 1 - first])
            positions.append(torch.cat([torch.arange(longest) - pad, rows]).clamp(min=0))
            visible.append(torch.arange(longest + BLOCK_SIZE) >= pad)
    wanted = torch.stack(labels)
    if drafter.draft_token_ids is not None:
        rows_of = torch.full((VOCAB_SIZE,), -100)
        rows_of[drafter.draft_token_ids] = torch.arange(len(SPOKEN))
        wanted = rows_of[wanted]
    head = target.get_output_embeddings() if drafter.lm_head is None else drafter.lm_head
    target.requires_grad_(False)
    drafter.requires_grad_(True)
    optimizer = torch.optim.Adam(drafter.parameters(), lr=5e-3)
    for _ in range(updates):
        hidden = drafter(
            torch.stack(noise), torch.stack(features), torch.stack(positions), torch.stack(visible).long()
        ).last_hidden_state
        logits = head(hidden[:, first:])
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), wanted.flatten()).backward()
        optimizer.step()
    drafter.requires_grad_(False)
