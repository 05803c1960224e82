"""The same tiny drafter kinds in every published layout, each written by its own makers' code, for one target."""

import json

import dflash_oracle
import speculators_oracle
import test_native_format as native
import torch
from dflash_oracle import BLOCK_SIZE, MASK_TOKEN_ID, TARGET_LAYER_IDS, WINDOW
from memorize import memorize
from safetensors.torch import load_file, save_file

from hf_dflow import DFlowDrafter

KINDS = ("dflash", "dflash2", "speculators", "speculators2", "transformers")  # speculators2: their own DFlash 2
SLIDING = {"full": None, "sliding": ["sliding_attention"] * 2, "mixed": ["sliding_attention", "full_attention"]}
# The largest distance that a sliding layer sees, as each format counts its window.
REACH = {kind: WINDOW - 1 if kind.startswith("dflash") else WINDOW for kind in KINDS}
# Where config.json names the tapped layers, and how far from `hidden_states`' own count.
TAPS = {
    "dflash": ("dflash_config.target_layer_ids", 1),
    "dflash2": ("dflash_config.target_layer_ids", 1),
    "speculators": ("aux_hidden_state_layer_ids", 0),
    "speculators2": ("aux_hidden_state_layer_ids", 0),
    "transformers": ("target_layer_ids", 1),
}
# The key that says what the test means by it, in each layout.
KEYS = {
    kind: {
        "block size": f"{draft}block_size",
        "mask token": f"{draft}mask_token_id",
        "tapped layers": TAPS[kind][0],
        "layer types": f"{layers}layer_types",
        "end of text": f"{layers}eos_token_id",
    }
    for kind, draft, layers in (
        ("dflash", "dflash_config.", ""),
        ("dflash2", "dflash_config.", ""),
        ("speculators", "", "transformer_layer_config."),
        ("speculators2", "", "transformer_layer_config."),
        ("transformers", "", ""),
    )
}


def write(kind: str, path, target, layers: str = "mixed", **fields) -> None:
    """A random drafter of two layers for `target` in layout `kind`; `fields` are those of the makers' configuration."""
    types = SLIDING[layers]
    slides = {} if types is None else {"layer_types": types, "sliding_window": WINDOW, "use_sliding_window": True}
    if kind == "transformers":
        native.make_folder(path, target, "mixed", block_size=BLOCK_SIZE, target_layer_ids=TARGET_LAYER_IDS,
                           layer_types=types or ["full_attention"] * 2, **fields)  # fmt: skip
    elif kind.startswith("speculators"):
        theirs = "dflash2" if kind == "speculators2" else "dflash"
        speculators_oracle.make_folder(path, target, kind=theirs, layers={"num_hidden_layers": 2, **slides}, **fields)
    else:
        make = dflash_oracle.make_dflash_folder if kind == "dflash" else dflash_oracle.make_dflash2_folder
        make(path, num_hidden_layers=2, **slides, **fields)


def edit(path, key: str, value) -> None:
    """Change `key` (`part.key` for one in an object) of config.json, or remove it with `None`."""
    file = path / "config.json"
    raw = json.loads(file.read_text())
    *parts, last = key.split(".")
    part = raw
    for name in parts:
        part = part[name]
    if value is None:
        del part[last]
    else:
        part[last] = value
    file.write_text(json.dumps(raw))


def taps_of(kind: str, path) -> list[int]:
    """Entries of `hidden_states` that the file itself names."""
    key, offset = TAPS[kind]
    raw = json.loads((path / "config.json").read_text())
    for name in key.split("."):
        raw = raw[name]
    return [i + offset for i in raw]


def scale_weights(path, factor: float) -> None:
    """Another drafter of the same shape: the context projection times `factor`."""
    file = path / "model.safetensors"
    weights = load_file(file)
    name = next(name for name in weights if name.endswith("fc.weight"))
    save_file({**weights, name: weights[name] * factor}, file, metadata={"format": "pt"})


def learned(kind: str, path, target, text: torch.Tensor, prompt_length: int, **options) -> DFlowDrafter:
    """The drafter in `path`, in the target's dtype, knowing most of `text` `[1, T]`."""
    drafter = DFlowDrafter.from_pretrained(path, attn_implementation="eager", dtype=target.dtype, **options)
    memorize(drafter, target, text, prompt_length=prompt_length)
    return drafter


__all__ = ["BLOCK_SIZE", "KEYS", "KINDS", "MASK_TOKEN_ID", "REACH", "WINDOW", "edit", "learned", "scale_weights",
           "taps_of", "write"]  # fmt: skip
