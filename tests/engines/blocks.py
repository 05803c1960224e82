"""Which blocks vLLM should have drafted, by the slow reference loop, and a comparison with those that it drafted."""

import json
from collections import Counter
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import pytest
import torch
from internals import watch_chains

from hf_dflow.reference import Relay, draft_block, verify


@dataclass
class Comparison:
    """Of the blocks of one scenario on one rank."""

    compared: int = 0
    changed: int = 0  # of the compared ones, by the relay
    accepted: int = 0
    skipped: Counter = field(default_factory=Counter)  # reason -> blocks that were not compared
    unfed: Counter = field(default_factory=Counter)  # reason -> blocks that were compared, without a relay
    different: list[str] = field(default_factory=list)

    def row(self, name: str) -> str:
        """A line of the table."""
        unfed = ", ".join(f"{count} {reason}" for reason, count in sorted(self.unfed.items()))
        skipped = ", ".join(f"{count} {reason}" for reason, count in sorted(self.skipped.items())) or "none"
        return (
            f"{name}: {self.compared} compared, {self.changed} changed by the relay; unfed: {unfed}; skipped: {skipped}"
        )


class Expected:
    """The blocks that a pair drafts, one step at a time, each after a target forward over the whole text.

    Args:
        target (`PreTrainedModel`): The target, in float32.
        drafter (`DFlowDrafter`): The drafter.
    """

    def __init__(self, target, drafter):
        self.drafter, self._target = drafter, target
        self._embedding, self._head = target.get_input_embeddings(), target.get_output_embeddings()
        self.rows = cache(self._rows)
        self.block = cache(self._block)

    @torch.no_grad()
    def _rows(self, tokens: tuple[int, ...]):
        return self._target(torch.tensor([tokens]), use_cache=False, output_hidden_states=True)

    @torch.no_grad()
    def verify(self, text: tuple[int, ...], drafts: tuple[int, ...]) -> tuple[int, int]:
        """Accepted drafts behind `text`, and the bonus."""
        logits = self.rows(text + drafts).logits[0, len(text) - 1 :]
        return verify("greedy", list(drafts), [], [], logits, iter(()))

    @torch.no_grad()
    def relay(self, text: tuple[int, ...], drafts: tuple[int, ...], accepted: int, bonus: int) -> Relay | None:
        """What the step that verified `drafts` behind `text` feeds to the next block."""
        if accepted == len(drafts):
            return None
        states = self.rows(text + drafts).hidden_states
        taps = torch.cat([states[i + 1][0] for i in self.drafter.config.target_layer_ids], dim=-1)
        first = len(text) + accepted  # the row of the first rejected draft
        slots = {1 + i: row for i, row in enumerate(taps[first:])}
        return Relay(slots, bonus, drafts[accepted])

    @torch.no_grad()
    def _block(self, text: tuple[int, ...], step: tuple | None) -> tuple[tuple[int, ...], float]:
        """The drafts behind `text`, and the smallest lead of a draft over the next best.

        `step`: the arguments of `relay` where one feeds the block.
        """
        relay = self.relay(*step) if step is not None and self.drafter.relay is not None else None
        states = draft_block(_Memoised(self), self.drafter, list(text), relay)
        logits = self.drafter.compute_logits(states, self._head).clone()
        logits[:, self.drafter.config.mask_token_id] = -torch.inf
        candidates = self.drafter.candidates(states[None], logits[None], self._embedding, self._head)
        drafts, lead = [], float("inf")
        for slot, row in enumerate(logits):
            if candidates is not None:
                row = candidates.logits(slot, torch.tensor([[*text, *drafts][-1]]), len(row))[0]
            best = row.topk(2)
            drafts.append(int(best.indices[0]))
            lead = min(lead, float(best.values[0] - best.values[1]))
        return tuple(drafts), lead


class _Memoised:
    """A target that remembers its forwards."""

    def __init__(self, expected: Expected):
        self._expected = expected
        self.get_input_embeddings = expected._target.get_input_embeddings

    def __call__(self, token_ids, **kwargs):
        return self._expected.rows(tuple(token_ids[0].tolist()))


def read_records(folder: Path) -> dict[str, dict[str, list[dict]]]:
    """`{file: {request: its records in order}}`, one file for each rank."""
    found: dict[str, dict[str, list[dict]]] = {}
    for path in sorted(folder.glob("*.jsonl")):
        requests: dict[str, list[dict]] = {}
        for line in path.read_text().splitlines():
            record = json.loads(line)
            requests.setdefault(record["request"], []).append(record)
        found[path.stem] = requests
    return found


def compare(expected: Expected, name: str, prompts: list[list[int]], records: dict[str, list[dict]]) -> Comparison:
    """The recorded blocks of scenario `name` against the expected ones.

    Each request's text is told from its prompt and from what the target verified, so that a request may be preempted,
    chunked or cached: what its steps read is taken from the records, what they should draft is not.
    """
    result = Comparison()
    for index, prompt in enumerate(prompts):
        text, block = list(prompt), None  # the anchor is the text's last token, `block` what was drafted behind it
        has_begun = False
        for number, record in enumerate(records.get(f"{name}-{index}", [])):
            where = f"{name}-{index}, call {number}"
            first, end = record["positions"][0], record["positions"][-1] + 1
            known = len(text)
            drafts = tuple(record["token_ids"][max(known - first, 0) :])
            read = record["token_ids"][: len(record["token_ids"]) - len(drafts)]
            assert read == text[first : first + len(read)], f"{where} reads another text"
            step = None
            if end < known:  # the rest of the prompt, or of a text that is computed again, comes in later calls
                result.unfed["inside a prompt (thrown away)"] += 1
                so_far = (*text[:end], record["anchor_id"])
            else:
                accepted, bonus = expected.verify(tuple(text), drafts)
                assert bonus == record["anchor_id"], f"{where}: anchor {record['anchor_id']}, expected {bonus}"
                assert (record["num_rejected"] or 0) == len(drafts) - accepted, f"{where}: {record['num_rejected']}"
                if drafts and (block is None or list(drafts) != block[: len(drafts)]):
                    result.unfed[f"(fed) after drafts that are no block: {set(drafts)}"] += 1
                if accepted < len(drafts):
                    step = (tuple(text), drafts, accepted, bonus)
                elif drafts:
                    result.unfed["after a step without rejections"] += 1
                elif not has_begun:
                    result.unfed["first of a request"] += 1
                elif first < known - 1:
                    result.unfed["after a preemption"] += 1
                else:
                    result.unfed["after a step without drafts"] += 1
                text += [*drafts[:accepted], bonus]
                result.accepted += accepted
                so_far, has_begun = tuple(text), True
                block = record["block"]
            (want, lead), (without, _) = expected.block(so_far, step), expected.block(so_far, None)
            result.compared += 1
            result.changed += want != without
            if list(want) != record["block"]:
                result.different.append(
                    f"{where}, {len(so_far)} tokens, fed {step is not None}, batch of {record['batch']}: "
                    f"{record['block']}, expected {list(want)} (without a relay {list(without)}), lead {lead:.2g}"
                )
    return result


def our_blocks(target, drafter, prompt: list[int], max_new_tokens: int) -> list[list[int]]:
    """What our own loop drafts for a prompt, greedily, step by step."""
    blocks = []
    with pytest.MonkeyPatch.context() as patch:
        watch_chains(patch, lambda proposal: blocks.append(proposal.token_ids[0].tolist()))
        target.generate(
            torch.tensor([prompt]),
            assistant_model=drafter,
            speculation_type="dflow",
            do_sample=False,
            max_new_tokens=max_new_tokens,
        )
    return blocks
