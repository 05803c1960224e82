"""Our drafters in the layouts of other servers, and back without a bit lost.

The layout for vLLM with this package's plugin holds all weights. What another layout cannot express is kept beside it:
relay and causal correction in `hf_dflow/parts.safetensors` (a folder below, where no server looks for weights), and
fields that a layout would not give back under `"hf_dflow"` in config.json.
"""

import json
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from hf_dflow._version import __version__
from hf_dflow.checkpoints.dflash import export_dflash
from hf_dflow.checkpoints.files import OWN_PARTS_FILE
from hf_dflow.checkpoints.layout import StoredTensor
from hf_dflow.checkpoints.speculators import export_speculators
from hf_dflow.checkpoints.vllm import OWN_WEIGHTS, export_vllm
from hf_dflow.errors import DrafterConfigError
from hf_dflow.text import give_usual_modes

__all__ = ["export_drafter"]

EXPORTERS = {"vllm": export_vllm, "dflash": export_dflash, "speculators": export_speculators}


def export_drafter(drafter: Any, folder: str | Path, to: str, num_target_layers: int | None = None) -> list[str]:
    """Write `drafter` into `folder`.

    Args:
        drafter (`DFlowDrafter`): In the dtype to be stored.
        folder (`str` or `Path`): Empty, or not there yet.
        to (`str`): "vllm" (for vLLM with this package's plugin: with relay and causal correction), "dflash" (z-lab's)
            or "speculators" (vLLM's); DFlash 2 of the last two where the drafter has its parts.
        num_target_layers (`int`, *optional*): Where the drafter does not record it; z-lab's layout needs it.

    Returns:
        `list[str]`: What to pass to the servers that read this layout.

    Raises:
        [`DrafterConfigError`]: The layout cannot express this drafter; the message names the obstacles.
    """
    folder = Path(folder)
    if folder.exists() and any(folder.iterdir()):
        raise DrafterConfigError(f"{folder} is not empty; export into a new folder.")
    if to not in EXPORTERS:
        raise DrafterConfigError(f"--to {to} is unknown; use one of {', '.join(EXPORTERS)}.")
    config = drafter.config
    weights = {name: tensor.detach().cpu().contiguous() for name, tensor in drafter.state_dict().items()}
    parts = {}  # kept aside
    if to != "vllm":
        parts = {name: weights.pop(name) for name in list(weights) if name.startswith(OWN_WEIGHTS)}
    export = EXPORTERS[to](config, weights, num_target_layers)
    stored = {name: StoredTensor("", tuple(weight.shape), weight.dtype) for name, weight in export.weights.items()}
    read_back = type(config)(**export.layout.read_fields(export.config, str(folder), stored, {}))
    lost = {
        key: getattr(config, key)
        for key in type(config).__annotations__
        if getattr(config, key) != getattr(read_back, key)
    }
    raw = {
        **export.config,
        "dtype": str(drafter.dtype).removeprefix("torch."),
        "hf_dflow": {
            "version": __version__,
            "note": "Exported from a DFlow drafter. Servers of this format ignore this key and the folder hf_dflow.",
            "config": lost,
        },
    }
    folder.mkdir(parents=True, exist_ok=True)
    save_file(export.weights, folder / "model.safetensors", metadata={"format": "pt"})
    if parts:
        (folder / OWN_PARTS_FILE).parent.mkdir()
        save_file(parts, folder / OWN_PARTS_FILE, metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(raw, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    give_usual_modes(folder.rglob("*.safetensors"))
    return server_options(str(folder), config, to)


def server_options(path: str, config: Any, to: str) -> list[str]:
    """The options with which vLLM and SGLang draft with the folder or repository `path` (z-lab/dflash, README.md)."""
    settings = {"method": "dflash", "model": path, "num_speculative_tokens": config.drafts_per_block}
    lines = [f"vLLM:   --speculative-config '{json.dumps(settings)}'"]
    if to == "dflash":
        lines.append(
            f"SGLang: --speculative-algorithm DFLASH --speculative-draft-model-path {path} "
            f"--speculative-num-draft-tokens {config.block_size}"
        )
    return lines
