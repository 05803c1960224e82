"""What the reuse of rejected rows could win, measured before any relay is trained.

`hf-dflow probe` walks greedy texts of the target as decoding with the relay off would, and looks at what the target had
already computed on the rejected rows. The names are those of the README's table of measures.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import Any

import numpy as np
import torch

from hf_dflow.bench.conditions import run_conditions
from hf_dflow.bench.intervals import MIN_ITEMS, bootstrap_interval, with_interval
from hf_dflow.bench.pairs import Pair
from hf_dflow.bench.strategies import Contestant, Mode, decode
from hf_dflow.bench.workloads import Prompt
from hf_dflow.console import Presentation, Remark, ResultTable
from hf_dflow.errors import DFlowError
from hf_dflow.generation._compat import capture_features
from hf_dflow.generation.statistics import tokens_per_step
from hf_dflow.model.drafter import DFlowDrafter
from hf_dflow.training.packing import IGNORED, Anchors, Sequences
from hf_dflow.training.proposals import greedy_proposals, proposal_features
from hf_dflow.training.rounds import draft_round

TOP = 5
COLUMNS = ("tokens_per_step", "re_convergence", "rescue_rate", "rescue_rate_top5", "largest_gain")


@dataclass(frozen=True)
class ProbeCounts:
    """Counts over the steps of one or more texts; a *hinted slot* is fed by a rejected row of the step before."""

    tokens: int = 0
    steps: int = 0
    hinted_slots: int = 0  # with a final token to compare to
    reconverged: int = 0  # the verifier's top-1 at the rejected row is the final token
    redrafted: int = 0  # the drafter's own new guess is
    only_verifier: int = 0  # the verifier's top-1 is, the drafter's new guess is not
    hinted_failures: int = 0  # steps whose first failure is at a hinted slot
    rescued: int = 0  # of those, where the verifier's top-1 is the final token
    rescued_top5: int = 0
    steps_if_rescued: int = 0  # steps of a walk whose hinted slots the verifier's top-1 mends where it is right

    def __add__(self, other: "ProbeCounts") -> "ProbeCounts":
        return ProbeCounts(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))


def figures(counts: ProbeCounts) -> dict[str, float]:
    """Shares and tokens per step of `counts`; a share of nothing is 0."""
    hinted, failures = max(counts.hinted_slots, 1), max(counts.hinted_failures, 1)
    return {
        "tokens_per_step": tokens_per_step(counts.tokens, counts.steps),
        "re_convergence": counts.reconverged / hinted,
        "redrafted": counts.redrafted / hinted,
        "only_verifier": counts.only_verifier / hinted,
        "share_of_steps_failing_at_hinted_slots": counts.hinted_failures / max(counts.steps, 1),
        "rescue_rate": counts.rescued / failures,
        "rescue_rate_top5": counts.rescued_top5 / failures,
        "largest_gain": counts.steps / max(counts.steps_if_rescued, 1) - 1,
    }


@torch.no_grad()
def probe_text(drafter: DFlowDrafter, target: Any, token_ids: Sequence[int], prompt_length: int) -> ProbeCounts:
    """Count on one text that `target` wrote greedily behind a prompt of `prompt_length` tokens.

    All blocks of the text are drafted, and verified by the target, in one forward each; a step is then a look-up.
    """
    places = {parameter.device for model in (drafter, target) for parameter in model.parameters()}
    if len(places) > 1 or target.device.type == "meta":
        raise DFlowError(
            f"drafter and target are on {', '.join(sorted(map(str, places)))} (meta: offloaded); load both onto one "
            "device"
        )
    config, length = drafter.config, len(token_ids)
    text = torch.tensor([list(token_ids)], device=target.device)
    states = target(text, output_hidden_states=True, use_cache=False).hidden_states
    features = capture_features(states, config.target_layer_ids)
    positions = torch.arange(prompt_length, length - 1, device=target.device)
    if not len(positions):
        return ProbeCounts()
    lengths = torch.tensor([length], device=target.device)
    sequences, anchors = Sequences(text, lengths, features), Anchors(torch.zeros_like(positions), positions)
    result = draft_round(drafter, target, sequences, anchors)
    drafts = greedy_proposals(drafter, target, result.hidden, text[0, positions])
    # The output of the last layer carries the final norm: the head turns it into the verifier's logits.
    last_layer = target.config.get_text_config().num_hidden_layers - 1
    verified = proposal_features(target, sequences, anchors, drafts, [last_layer])
    top = target.get_output_embeddings()(verified.to(target.dtype)).topk(TOP, dim=-1).indices
    return _walk(drafts.cpu(), result.labels.cpu(), top.cpu())


def _walk(drafts: torch.Tensor, labels: torch.Tensor, top: torch.Tensor) -> ProbeCounts:
    """Count along the steps. `drafts`, `labels` `[A, N]` of every anchor; `top` `[A, N + 1, TOP]` of every row."""
    num_drafts = drafts.shape[1]
    is_right = drafts == labels
    num_labels = (labels != IGNORED).sum(dim=1).tolist()
    counts = ProbeCounts()
    for is_mended in (False, True):
        anchor, hints = 0, top[:0, 0]  # [slots, TOP] of rejected rows: row j of a step feeds slot j - accepted
        while anchor < len(drafts):
            right, hinted = is_right[anchor].clone(), hints[: num_labels[anchor]]
            final = labels[anchor, : len(hinted)]
            is_hint_right = hinted[:, 0] == final
            if is_mended:
                right[: len(hinted)] |= is_hint_right
            accepted = int(right.long().cumprod(0).sum())
            if is_mended:
                counts += ProbeCounts(steps_if_rescued=1)
            else:
                redrafted, failed_at_hint = right[: len(hinted)], accepted < len(hinted)
                counts += ProbeCounts(
                    steps=1,
                    tokens=min(accepted + 1, len(drafts) - anchor),
                    hinted_slots=len(hinted),
                    reconverged=int(is_hint_right.sum()),
                    redrafted=int(redrafted.sum()),
                    only_verifier=int((is_hint_right & ~redrafted).sum()),
                    hinted_failures=int(failed_at_hint),
                    rescued=int(failed_at_hint and is_hint_right[accepted]),
                    rescued_top5=int(failed_at_hint and (hinted[accepted] == final[accepted]).any()),
                )
            hints = top[anchor, accepted + 1 :] if accepted < num_drafts else top[:0, 0]
            anchor += accepted + 1
    return counts


def summarise(counts: Iterable[ProbeCounts]) -> dict[str, Any]:
    """Pooled figures, each with a 95% bootstrap interval over texts."""
    rows = np.array([astuple(of_text) for of_text in counts])

    def figure(name: str) -> dict[str, Any]:
        def pooled(chosen) -> float:
            return figures(ProbeCounts(*rows[chosen].sum(axis=0).tolist()))[name]

        interval = bootstrap_interval(len(rows), pooled) if len(rows) >= MIN_ITEMS else None
        return {"value": pooled(slice(None)), "interval_95": interval, "n": len(rows)}

    return {name: figure(name) for name in figures(ProbeCounts())}


def probe_prompts(pair: Pair, prompts: Sequence[Prompt], max_new_tokens: int) -> dict[str, Any]:
    """Let the pair answer greedily, and summarise what its rejected rows knew: by task, and for all prompts.

    A `KeyboardInterrupt` after the first prompt ends the probing; the record holds what was finished.
    """
    without_relay = Contestant("dflash", pair.drafter, use_relay=False)
    by_task: dict[str, list[ProbeCounts]] = {}
    is_interrupted = False
    try:
        for prompt in prompts:
            inputs = pair.encode(prompt.text)
            run = decode(pair.target, inputs, without_relay, Mode(), max_new_tokens)
            token_ids = inputs["input_ids"][0].tolist() + run.new_tokens
            counts = probe_text(pair.drafter, pair.target, token_ids, inputs["input_ids"].shape[1])
            by_task.setdefault(prompt.task, []).append(counts)
    except KeyboardInterrupt:
        if not by_task:
            raise
        is_interrupted = True
    record = {task: summarise(counts) for task, counts in by_task.items()}
    if len(by_task) > 1:
        record["all"] = summarise([of_text for counts in by_task.values() for of_text in counts])
    num_prompts = sum(map(len, by_task.values()))
    conditions = {**pair.describe(), "max_new_tokens": max_new_tokens, "relay": "off", "prompts": num_prompts}
    return {"by_task": record, "conditions": run_conditions(**conditions), "interrupted": is_interrupted}


def present(record: Mapping[str, Any]) -> Presentation:
    """The figures of each task."""
    rows = [
        [task, *(with_interval(values[name], ".2f" if name == "tokens_per_step" else ".1%") for name in COLUMNS)]
        for task, values in record["by_task"].items()
    ]
    headings = [name.replace("_", " ") for name in COLUMNS]
    explanation = (
        "re convergence, rescue rate: the verifier's top-1 at a rejected row was the final token, of all hinted slots "
        "and of first failures. largest gain: tokens per step if a relay used it wherever it is right, which is the "
        "most that reuse can win."
    )
    table = ResultTable("what rejected rows knew [95% interval]", ("task",), headings, rows)
    remarks = [Remark(explanation)]
    if record.get("interrupted"):
        remarks.append(Remark("The probing was interrupted: prompts that were not finished are missing.", "yellow"))
    return Presentation("What rejected rows knew", [table], remarks)
