"""Model cards: a first one from the template, and a check of what a reader and the Hub need to find in one."""

import re
from pathlib import Path
from typing import Any

from hf_dflow._version import __version__

__all__ = ["check_card", "make_card"]

TEMPLATE = Path(__file__).parent / "card_template.md"
LIBRARY, PIPELINE = "hf_dflow", "text-generation"
TAGS = ("speculative-decoding", "block-diffusion", "dflow")
OWN_TARGET = "own-target"  # instead of base_model, where the target lies in the same repository
METRIC = "tokens_per_step"
FILL_IN = "[fill in"
MACHINE_PATHS = re.compile(r"(?:^|[\s(\"'`])(?:/(?:home|root|Users|work|tmp|mnt)/|[A-Z]:\\)")
# Section -> what its text must hold, in words for the message and as a pattern.
SECTIONS = {
    "Use": ("a code block that loads the drafter", r"```"),
    "Training": ("what data it was trained on", r"\w+"),
    "Acceptance": ("a table", r"\|\s*-{3}"),
    "Hardware and versions": ("the versions of transformers and torch", r"(?s)(?=.*transformers)(?=.*torch)"),
    "Limits": ("what it is not for", r"\w+"),
}


def make_card(drafter: Any, repository: str | None = None, licence: str | None = None) -> str:
    """A card for `drafter` from the template; what only its maker knows is marked with "[fill in: …]".

    Args:
        drafter (`DFlowDrafter`): Its configuration fills what it can.
        repository (`str`, *optional*): Where it will be published.
        licence (`str`, *optional*): An identifier of the Hub's list, e.g. "apache-2.0".
    """
    import torch
    import transformers
    from huggingface_hub import ModelCard, ModelCardData

    config = drafter.config
    parts = {"verifier relay": drafter.relay, "causal correction": drafter.causal_correction}
    data = ModelCardData(
        license=licence,
        library_name=LIBRARY,
        pipeline_tag=PIPELINE,
        base_model=config.target_name,
        tags=list(TAGS),
    )
    card = ModelCard.from_template(
        data,
        template_path=str(TEMPLATE),
        title=(repository or config._name_or_path or "Drafter").rstrip("/").split("/")[-1],
        repository=repository,
        target=config.target_name,
        parts=" and ".join(name for name, part in parts.items() if part is not None),
        num_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        num_parameters=f"{sum(weight.numel() for weight in drafter.parameters()):,}",
        dtype=str(drafter.dtype).removeprefix("torch."),
        block_size=config.block_size,
        drafts=config.drafts_per_block,
        taps=", ".join(map(str, config.target_layer_ids)),
        embedding="its own" if config.input_embedding == "own" else "the target's",
        head="its own" if config.output_head == "own" else "the target's",
        mask_token_id=config.mask_token_id,
        chat_mode=config.chat_mode,
        version=__version__,
        transformers_version=transformers.__version__,
        torch_version=torch.__version__.split("+")[0],
    )
    return str(card)


def check_card(text: str) -> list[str]:
    """A sentence for each thing that is missing or wrong in a card.

    The front matter is read by huggingface_hub, a model-index included.
    """
    from huggingface_hub import ModelCard

    if not re.match(r"\s*---\r?\n", text):
        return ["it has no front matter: begin with '---', YAML, '---'"]
    try:
        card = ModelCard(text)
    except Exception as error:  # YAML's and huggingface_hub's own
        return [f"its front matter cannot be read: {error}"]
    return _check_data(card.data.to_dict(), card.data) + _check_text(card.text)


def _check_data(data: dict[str, Any], parsed: Any) -> list[str]:
    problems = []
    licence, tags = data.get("license"), data.get("tags") or []
    if not licence or not isinstance(licence, str):
        problems.append("'license' is missing; use an identifier of the Hub's list, or 'other' with 'license_name'")
    elif licence == "other" and not data.get("license_name"):
        problems.append("'license: other' needs 'license_name'")
    for key, value in (("library_name", LIBRARY), ("pipeline_tag", PIPELINE)):
        if data.get(key) != value:
            problems.append(f"'{key}' is {data.get(key)!r}; write {value}")
    if not isinstance(tags, list) or not set(TAGS) <= set(tags):
        problems.append(f"'tags' lacks {', '.join(sorted(set(TAGS) - set(tags)))}")
    if not data.get("base_model") and OWN_TARGET not in tags:
        problems.append(f"'base_model' is missing; name the target, or tag '{OWN_TARGET}' where it is here too")
    results = getattr(parsed, "eval_results", None) or []
    if not any(result.metric_type == METRIC and isinstance(result.metric_value, int | float) for result in results):
        problems.append(f"'model-index' has no result with the metric '{METRIC}' and a number")
    return problems


def _check_text(text: str) -> list[str]:
    problems = []
    sections = {title.strip(): body for title, body in re.findall(r"(?ms)^## (.+?)$(.*?)(?=^## |\Z)", text)}
    for title, (content, pattern) in SECTIONS.items():
        if title not in sections:
            problems.append(f"the section '## {title}' is missing")
        elif not re.search(pattern, sections[title]):
            problems.append(f"the section '## {title}' lacks {content}")
    if "Acceptance" in sections and not re.search(r"(?i)greedy|temperature|\bT = \d", sections["Acceptance"]):
        problems.append("the section '## Acceptance' does not say under which conditions: greedy or which temperature")
    count = text.count(FILL_IN)
    if count:
        problems.append(f"{count} place(s) are still to be filled in ('{FILL_IN}: …]')")
    if MACHINE_PATHS.search(text):
        problems.append("it contains a path of somebody's machine")
    return problems
