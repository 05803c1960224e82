"""`hf-dflow calibrate`: fit a drafter's decisions on recorded text, a few numbers that its configuration then holds.

* The mixture's weight ([`StaleMixture`]): the coefficients under which the drafter's law, mixed with that of the
  rejected row, gives the tokens that verification revealed the highest likelihood.
* The calibration of its confidence ([`LengthPlanner`]): for the first, the second and later slots, the line through its
  logit that predicts acceptance best (Platt scaling, 1999).
* How much texts differ in difficulty, and so how fast a row corrects that line by its own steps: the prior precision
  under which the planner, run over each recorded text, predicted best (empirical Bayes).

While recording, neither is in use, so that both are fitted on the drafter's own law.
"""

import json
import math
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.progress import track

from hf_dflow.bench.pairs import Pair
from hf_dflow.bench.strategies import Contestant, Mode, decode
from hf_dflow.bench.workloads import Prompt
from hf_dflow.errors import DFlowError
from hf_dflow.generation.mixture import LARGEST_WEIGHT, StaleMixture
from hf_dflow.generation.policy.costs import StepCosts
from hf_dflow.generation.policy.lengths import LEAST_CONFIDENCE, LengthPlanner
from hf_dflow.generation.step import Proposal, Verification, VerifierFeedback
from hf_dflow.model.configuration import SLOT_GROUPS

MODES = {"greedy": Mode(), "sampled": Mode(1.0, "token")}
# Overrides the drafter's defaults: its own law is recorded, verified by the lossless rule.
NOTHING_IN_USE = dict.fromkeys(("stale_mixture", "adaptive_length", "tree_budget", "acceptance_threshold"), False)
FEWEST = 200  # revealed slots, or judged drafts; with fewer nothing is fitted
RIDGE = 1.0  # weight of squared coefficients against log-likelihoods of single tokens
SMALLEST = 1e-9  # probability whose logarithm is taken
NEVER = 1e12  # precision of a row that learns nothing
CONFIG = "config.json"
PRECISIONS = tuple(2.0 ** (exponent / 2) for exponent in range(-4, 17))  # 0.25 … 256: texts apart by 2 … 1/16 logit


class JudgedStep(NamedTuple):
    """The drafts of a step as far as verification judged them: their confidences, and how many were accepted."""

    confidences: list[float]
    accepted: int


@dataclass
class Log:
    """What decoding showed; all rows' copies of a [`Recorder`] share it."""

    traits: list[torch.Tensor] = field(default_factory=list)  # [slots, NUM_TRAITS] of each step
    likelihoods: list[torch.Tensor] = field(default_factory=list)  # [slots, 3] drafter's, rejected row's, kept mass
    texts: list[list[JudgedStep]] = field(default_factory=lambda: [[]])  # the last one is being decoded

    def __deepcopy__(self, memo: dict) -> "Log":
        return self


class Recorder(StaleMixture):
    """Records what a mixture would have fed, and leaves the drafts as they are."""

    def __init__(self, log: Log, is_sampled: bool):
        super().__init__()
        self.log, self.is_sampled = log, is_sampled
        self._confidences: list[float] = []

    def adjust_draft_logits(self, draft_logits: torch.Tensor, feedback: VerifierFeedback | None) -> torch.Tensor:
        super().adjust_draft_logits(draft_logits, feedback)
        self._confidences = _confidences(draft_logits)
        return draft_logits

    def observe(self, proposal: Proposal, verification: Verification) -> None:
        mixed, self._mixed = self._mixed, None
        accepted, verified = int(verification.accepted_length[0]), proposal.token_ids.shape[1]
        # The planner sees the backbone's own law where drafts are sampled: see `Proposal.confidences`.
        confidences = self._confidences if self.is_sampled else _confidences(proposal.logits)
        if verified:
            self.log.texts[-1].append(JudgedStep(confidences[: min(verified, accepted + 1)], accepted))
        if mixed is not None:
            revealed = self._reveal(mixed, proposal, verification)
            columns = torch.stack([revealed.own, revealed.stale, mixed.kept], dim=-1)
            self.log.traits.append(mixed.traits[revealed.is_revealed].cpu())
            self.log.likelihoods.append(columns[revealed.is_revealed].cpu())


def _confidences(logits: torch.Tensor) -> list[float]:
    return (logits.amax(dim=-1) - logits.logsumexp(dim=-1)).exp()[0].tolist()


def fit_mixture(traits: torch.Tensor, likelihoods: torch.Tensor) -> tuple[list[float], dict[str, float]]:
    """Coefficients of the mixture's weight, and the mean log-likelihood of a revealed token without and with it.

    Args:
        traits (`torch.Tensor` of shape `(M, NUM_TRAITS)`): Of M revealed slots, see [`StaleMixture`].
        likelihoods (`torch.Tensor` of shape `(M, 3)`): Of each slot's token by the drafter and by the rejected row's
            likeliest tokens, and the mass of these.
    """
    traits = traits.double()
    own, stale, kept = likelihoods.double().unbind(dim=-1)
    smallest = torch.finfo(torch.float32).tiny

    def gain(coefficients: torch.Tensor) -> torch.Tensor:
        weights = (traits @ coefficients).sigmoid().clamp(max=LARGEST_WEIGHT) * kept
        return ((1 - weights) * own + weights * stale).clamp(min=smallest).log()

    coefficients = torch.zeros(traits.shape[1], dtype=torch.float64)
    coefficients[0] = -3.0  # a weight of 0.05
    _minimise(coefficients, lambda: RIDGE * coefficients[1:].square().sum() - gain(coefficients).sum())
    means = {"drafter": float(own.clamp(min=smallest).log().mean()), "mixture": float(gain(coefficients).mean())}
    return coefficients.tolist(), {"slots": len(own), **means}


def fit_calibration(texts: list[list[JudgedStep]]) -> tuple[list[list[float]], dict[str, float]]:
    """A line (intercept, slope) for each group of slots, and the mean error of confidence without and with it."""
    judged = [
        (slot, confidence, slot < accepted)
        for steps in texts
        for confidences, accepted in steps
        for slot, confidence in enumerate(confidences)
    ]
    slots = torch.tensor([min(slot, SLOT_GROUPS - 1) for slot, _, _ in judged])
    confidences = torch.tensor([confidence for _, confidence, _ in judged], dtype=torch.float64)
    confidences = confidences.clamp(LEAST_CONFIDENCE, 1 - LEAST_CONFIDENCE)
    accepted = torch.tensor([float(is_accepted) for _, _, is_accepted in judged], dtype=torch.float64)
    lines = torch.tensor([[0.0, 1.0]] * SLOT_GROUPS, dtype=torch.float64)

    def predicted() -> torch.Tensor:
        return (lines[slots, 0] + lines[slots, 1] * confidences.logit()).sigmoid()

    def loss() -> torch.Tensor:
        distance = (lines - torch.tensor([0.0, 1.0])).square().sum()
        return torch.nn.functional.binary_cross_entropy(predicted(), accepted, reduction="sum") + RIDGE * distance

    before = float((confidences - accepted).mean())
    _minimise(lines, loss)
    after = float((predicted() - accepted).mean())
    return lines.tolist(), {"drafts": len(judged), "too_sure_before": before, "too_sure_after": after}


def fit_precision(texts: list[list[JudgedStep]], lines: list[list[float]]) -> tuple[float, dict[str, float]]:
    """The one of `PRECISIONS` that predicts best, and a judged draft's mean log-likelihood with and without learning.

    Each text is learned from alone, as a row is.

    Args:
        texts (`list[list[JudgedStep]]`): The steps of each, in order.
        lines (`list[list[float]]`): Of [`fit_calibration`].
    """

    def likelihood(precision: float) -> float:
        predictions = [outcome for steps in texts for outcome in predictions_of(steps, lines, precision)]
        probs = [predicted if is_accepted else 1.0 - predicted for predicted, is_accepted in predictions]
        return sum(math.log(max(prob, SMALLEST)) for prob in probs) / len(probs)

    likelihoods = {precision: likelihood(precision) for precision in PRECISIONS}
    best = max(likelihoods, key=likelihoods.__getitem__)
    return best, {"likelihood": likelihoods[best], "likelihood_without": likelihood(NEVER)}


def predictions_of(steps: list[JudgedStep], lines: list[list[float]], precision: float) -> list[tuple[float, bool]]:
    """What a row's planner would have predicted for each judged draft, and whether it was accepted."""
    longest = max((len(step.confidences) for step in steps), default=0)
    planner = LengthPlanner(StepCosts(0.0, (1.0,) * (longest + 1)), lines, precision=precision)
    for confidences, accepted in steps:
        planner.choose(confidences)
        planner.learn(len(confidences), accepted)
    return planner.outcomes


def _minimise(parameters: torch.Tensor, loss: Any) -> None:
    parameters.requires_grad_(True)
    optimizer = torch.optim.LBFGS([parameters], max_iter=200, line_search_fn="strong_wolfe")

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        value = loss()
        value.backward()
        return value

    optimizer.step(closure)
    parameters.requires_grad_(False)


def fit(pair: Pair, prompts: list[Prompt], max_new_tokens: int, console: Console | None = None) -> dict[str, Any]:
    """`fitted_decisions` of the pair's drafter, and under `found` how well they fit."""
    fitted: dict[str, Any] = {"calibration": {}, "row_precision": {}}
    fits: dict[str, Any] = {}
    for kind, mode in MODES.items():
        log = Log()
        recorder = Recorder(log, is_sampled=mode.temperature > 0)
        contestant = Contestant(kind, pair.drafter, options={**NOTHING_IN_USE, "acceptance_processors": [recorder]})
        followed = track(prompts, kind, console=console, disable=console is None)
        for seed, prompt in enumerate(followed):
            log.texts.append([])
            decode(pair.target, pair.encode(prompt.text), contestant, mode, max_new_tokens, seed)
        revealed = sum(map(len, log.traits))
        judged = sum(len(step.confidences) for steps in log.texts for step in steps)
        if min(judged, revealed) < FEWEST:
            raise DFlowError(
                f"{kind}: {judged} drafts were judged and {revealed} fed slots revealed; fitting needs "
                f"{FEWEST} of both: give more prompts, or a larger --max-new-tokens"
            )
        lines, fits[f"calibration, {kind}"] = fit_calibration(log.texts)
        fitted["calibration"][kind] = lines
        fitted["row_precision"][kind], fits[f"row precision, {kind}"] = fit_precision(log.texts, lines)
        if kind == "greedy":  # what a rejected row knows does not depend on how drafts are chosen
            fitted["mixture"], fits["mixture"] = fit_mixture(torch.cat(log.traits), torch.cat(log.likelihoods))
    return {"fitted_decisions": fitted, "found": fits}


def keep(folder: Path, fitted: dict[str, Any]) -> None:
    """Write `fitted_decisions` into the configuration in `folder`; an interruption leaves the old one."""
    path = folder / CONFIG
    text = json.dumps({**own_config(folder), "fitted_decisions": fitted}, indent=2, sort_keys=True)
    unfinished = path.with_suffix(".partial")
    unfinished.write_text(text + "\n", encoding="utf-8")
    os.replace(unfinished, path)


def own_config(folder: Path) -> dict[str, Any]:
    """The configuration of a drafter that this package saved."""
    path = folder / CONFIG
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DFlowError(f"{path} cannot be read ({error}); name the folder of a drafter") from error
    if not isinstance(config, dict) or config.get("model_type") != "dflow_drafter":
        raise DFlowError(
            f"{path} is of another format, which has no place for what is fitted; load the drafter and save it with "
            "save_pretrained first"
        )
    return config
