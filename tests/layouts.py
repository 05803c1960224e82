"""Tiny drafters in every layout that can be loaded, each but our own written by its makers' code, for one target."""

import functools
import json
import tempfile
from pathlib import Path

import dflash_oracle
import speculators_oracle
import torch
from dflash_oracle import BLOCK_SIZE, MASK_TOKEN_ID, TARGET_LAYER_IDS, WINDOW
from kit import ROPE, shared_target, tiny_drafter
from memorize import memorize
from safetensors.torch import load_file, save_file
from transformers import MuseGlimmerAssistantConfig, MuseGlimmerAssistantModel

from hf_dflow import DFlowDrafter

KINDS = ("dflash", "dflash2", "speculators", "speculators2", "transformers")  # speculators2: their own DFlash 2
LAYOUTS = ("dflow", *KINDS)
TYPES = {
    "full": ["full_attention"] * 2,
    "sliding": ["sliding_attention"] * 2,
    "mixed": ["sliding_attention", "full_attention"],
}
# The largest distance that a sliding layer sees, as each format counts its window.
REACH = {kind: WINDOW - 1 if kind.startswith("dflash") else WINDOW for kind in KINDS}
# Where each config.json keeps the draft keys and those of the layers, and the name of the tapped layers.
DRAFT_KEYS = {kind: "dflash_config." if kind.startswith("dflash") else "" for kind in LAYOUTS}
LAYER_KEYS = {kind: "transformer_layer_config." if kind.startswith("speculators") else "" for kind in LAYOUTS}
TAPS = {
    kind: "aux_hidden_state_layer_ids" if kind.startswith("speculators") else f"{DRAFT_KEYS[kind]}target_layer_ids"
    for kind in LAYOUTS
}


class Payload:
    """Leaves a mark when it is unpickled."""

    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return (type(self.marker).touch, (self.marker,))


def write(kind: str, path, target, layers: str = "mixed", **fields):
    """Write a random drafter of two layers for `target` in layout `kind`, and return its makers' model.

    `fields` are those of the makers' configuration.
    """
    slides = {"layer_types": TYPES[layers], "sliding_window": WINDOW, "use_sliding_window": True}
    slides = {} if layers == "full" else slides
    if kind == "dflow":
        slides.pop("use_sliding_window", None)
        drafter = tiny_drafter(target, BLOCK_SIZE, mask_token_id=MASK_TOKEN_ID, **slides, **fields)
        drafter.save_pretrained(path)
        return drafter
    if kind == "transformers":
        return write_native(path, target, layers, **fields)
    if kind.startswith("speculators"):
        their_kind = "dflash2" if kind == "speculators2" else "dflash"
        layer_fields = {"num_hidden_layers": 2, **slides}
        return speculators_oracle.make_folder(path, target, kind=their_kind, layers=layer_fields, **fields)
    make = dflash_oracle.make_dflash_folder if kind == "dflash" else dflash_oracle.make_dflash2_folder
    return make(path, num_hidden_layers=2, **slides, **fields)


def write_native(path, target, layers: str, **fields) -> MuseGlimmerAssistantModel:
    """A random assistant of transformers' own."""
    common = {
        "hidden_size": target.config.get_text_config().hidden_size,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 256,
        "sliding_window": WINDOW,
        "layer_types": TYPES[layers],
        "block_size": BLOCK_SIZE,
        "mask_token_id": MASK_TOKEN_ID,
        "target_layer_ids": TARGET_LAYER_IDS,
        "rope_parameters": dict(ROPE),
        "initializer_range": 0.3,
    }
    with torch.random.fork_rng():
        torch.manual_seed(1)
        config = MuseGlimmerAssistantConfig(**{**common, **fields})
        assistant = MuseGlimmerAssistantModel._from_config(config, attn_implementation="eager").eval()
    assistant.save_pretrained(path)
    return assistant


@functools.cache
def original(kind: str, layers: str = "mixed", **fields) -> Path:
    """A folder in layout `kind` for the shared target, written once in a process. No test may change it."""
    path = Path(tempfile.mkdtemp()) / kind
    write(kind, path, shared_target(dtype=torch.float32), layers, **fields)
    return path


def edit(path, changes: dict) -> None:
    """Set keys of config.json ("part.key" for one in an object), or remove those that are `None`."""
    file = Path(path) / "config.json"
    raw = json.loads(file.read_text())
    for key, value in changes.items():
        *parts, last = key.split(".")
        part = functools.reduce(lambda inner, name: inner[name], parts, raw)
        part[last] = value
        if value is None:
            del part[last]
    file.write_text(json.dumps(raw))


def taps_of(kind: str, path) -> list[int]:
    """Entries of `hidden_states` that the file itself names."""
    raw = json.loads((path / "config.json").read_text())
    ids = functools.reduce(lambda inner, name: inner[name], TAPS[kind].split("."), raw)
    return [i + (0 if kind.startswith("speculators") else 1) for i in ids]


def scale_weights(path, factor: float) -> None:
    """Make it another drafter of the same shape: the context projection times `factor`."""
    file = path / "model.safetensors"
    weights = load_file(file)
    name = next(name for name in weights if name.endswith("fc.weight"))
    save_file({**weights, name: weights[name] * factor}, file, metadata={"format": "pt"})


def learned(path, target, text: torch.Tensor, prompt_length: int, **options) -> DFlowDrafter:
    """The drafter in `path`, in the target's dtype, knowing most of `text` `[1, T]`."""
    drafter = DFlowDrafter.from_pretrained(path, attn_implementation="eager", dtype=target.dtype, **options)
    if drafter.candidate_selector is not None:
        with torch.no_grad():
            drafter.candidate_selector.successor_codebook.weight *= 0.4  # it is not trained: let it err now and then
    memorize(drafter, target, text, prompt_length=prompt_length)
    return drafter


__all__ = [
    "BLOCK_SIZE",
    "DRAFT_KEYS",
    "KINDS",
    "LAYER_KEYS",
    "LAYOUTS",
    "MASK_TOKEN_ID",
    "REACH",
    "TAPS",
    "WINDOW",
    "Payload",
    "edit",
    "learned",
    "original",
    "scale_weights",
    "taps_of",
    "write",
]  # fmt: skip
