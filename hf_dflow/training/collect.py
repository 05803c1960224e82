"""From prompts to a file of training rows: which prompts are left out, which are answered, and a report of both."""

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from hashlib import sha256
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

from hf_dflow.errors import DFlowError
from hf_dflow.training.answers import Sampling, answer_batch, plan_batches
from hf_dflow.training.data import RowFile, is_held_out, row_record
from hf_dflow.training.prompts import Prompt
from hf_dflow.training.templates import ChatTemplate, ChatTemplateError

PARTS = ("all", "train", "held-out")


@dataclass
class DataReport:
    """What became of the prompts."""

    prompts: int
    max_length: int
    other_part: int = 0
    duplicates: int = 0
    over_long: int = 0
    refused: int = 0
    first_refusal: str = ""
    rows: int = 0
    supervised_tokens: int = 0
    finished: int = 0

    def __str__(self) -> str:
        reason = f" (the first: {self.first_refusal})" if self.refused else ""
        return (
            f"{self.rows} rows with {self.supervised_tokens} supervised tokens, {self.finished} of them finished\n"
            f"{self.prompts} prompts read; left out: {self.other_part} of the other part, {self.duplicates} "
            f"duplicates, {self.over_long} over-long (limit {self.max_length} tokens), {self.refused} that cannot be "
            f"rendered{reason}"
        )

    def count_rows(self, file: RowFile) -> "DataReport":
        """Take rows, tokens and finished answers from the file."""
        self.rows, self.supervised_tokens, self.finished = file.rows, file.supervised_tokens, file.finished
        return self

    def check_not_empty(self, left: list) -> None:
        """Raise unless something is `left` to train on."""
        if not left:
            raise DFlowError(f"nothing to train on: no token would be supervised\n{self}")


@dataclass
class Job:
    """What rows are made of."""

    prompts: list[Prompt]
    template: ChatTemplate
    target: dict[str, Any]  # from `describe_target`
    source: str  # where the prompts come from, in words
    part: str = "all"  # "train", "held-out" (by the hash of the prompt) or "all"
    max_length: int = 1024  # of a row in tokens, answer included
    report: DataReport = field(init=False)

    def __post_init__(self):
        if self.part not in PARTS:
            raise DFlowError(f"--part {self.part} is unknown; use one of {', '.join(PARTS)}")
        self.report = DataReport(len(self.prompts), self.max_length)

    def select(self) -> list[Prompt]:
        """Prompts of the part, without duplicates."""
        keys, selected = set(), []
        for prompt in self.prompts:
            if self.part != "all" and is_held_out(prompt.text) != (self.part == "held-out"):
                self.report.other_part += 1
            elif prompt.key in keys:
                self.report.duplicates += 1
            else:
                keys.add(prompt.key)
                selected.append(prompt)
        return selected

    def refuse(self, error: ChatTemplateError) -> None:
        """Count a chat that cannot be rendered."""
        self.report.refused += 1
        self.report.first_refusal = self.report.first_refusal or str(error)

    def settings(self, prompts: list[Prompt], sampling: Sampling | None) -> dict[str, Any]:
        """All that the rows depend on; `sampling` is `None` for answers that were given."""
        digest = sha256("".join(prompt.key for prompt in prompts).encode()).hexdigest()
        return {
            "target": self.target,
            "template": self.template.describe(),
            "sampling": sampling and asdict(sampling),
            "prompts": {"source": self.source, "part": self.part, "count": len(prompts), "sha256": digest},
            "max_length": self.max_length,
            "versions": {"transformers": transformers.__version__, "torch": torch.__version__},
        }


# -- the target's own answers


def collect_answers(
    job: Job, model: PreTrainedModel, output: Path, sampling: Sampling, log: Callable[[str], None] = lambda _: None
) -> DataReport:
    """Have the target answer the prompts and write its answers; resumes a file with the same settings.

    Raises:
        DFlowError: No prompt is left, or `output` was made with other settings.
    """
    chats = _encode_prompts(job, sampling.max_new_tokens)
    job.report.check_not_empty(chats)
    batches = plan_batches([len(prompt_ids) for _, prompt_ids in chats], sampling.batch_size, sampling.seed)
    file = RowFile(output, job.settings([prompt for prompt, _ in chats], sampling))

    rows_before = [0, *accumulate(len(batch) for batch in batches)]
    first = sum(rows <= file.rows for rows in rows_before) - 1
    file.keep(rows_before[first])  # a batch that was half written is answered again, with the same answers
    if first:
        log(f"resuming after {file.rows} rows")
    pad_id = job.template.tokenizer.pad_token_id
    started, tokens_before = time.perf_counter(), file.supervised_tokens
    for number in range(first, len(batches)):
        batch = [chats[i] for i in batches[number]]
        answers = answer_batch(
            model,
            [prompt_ids for _, prompt_ids in batch],
            sampling,
            number,
            job.template.eos_ids,
            0 if pad_id is None else pad_id,
        )
        file.append(
            [
                row_record(
                    token_ids=prompt_ids + answer.token_ids,
                    spans=[(len(prompt_ids), len(prompt_ids) + len(answer.token_ids))],
                    prompt=prompt.text,
                    temperature=sampling.temperatures[number % len(sampling.temperatures)],
                    finished=answer.is_finished,
                )
                for (prompt, prompt_ids), answer in zip(batch, answers, strict=True)
            ]
        )
        seconds = time.perf_counter() - started
        left = seconds / (file.rows - rows_before[first]) * (len(chats) - file.rows)
        speed = (file.supervised_tokens - tokens_before) / seconds
        log(f"{file.rows}/{len(chats)} answers, {speed:.0f} tokens/s, about {left / 60:.0f} min left")
    return job.report.count_rows(file)


def _encode_prompts(job: Job, max_new_tokens: int) -> list[tuple[Prompt, list[int]]]:
    """The job's prompts with the token ids that the target answers, where an answer fits."""
    chats = []
    for prompt in job.select():
        try:
            question = prompt.question()
            if not question.messages:
                raise ChatTemplateError("the chat asks nothing: only the assistant speaks")
            prompt_ids = job.template.encode_prompt(question.messages, prompt.tools)
        except ChatTemplateError as error:
            job.refuse(error)
            continue
        if len(prompt_ids) + max_new_tokens > job.max_length:
            job.report.over_long += 1
        else:
            chats.append((prompt, prompt_ids))
    return chats


# -- answers that the chats already hold


def collect_chats(job: Job, output: Path) -> DataReport:
    """Write chats that hold their answers; only what the assistant wrote is supervised.

    The file appears when it is complete. One that was made with the same settings is left as it is.

    Raises:
        DFlowError: No assistant's token is left, or `output` was made with other settings.
    """
    selected, records, written = job.select(), [], set()
    for prompt in selected:
        try:
            rows = job.template.encode_answers(prompt.messages, prompt.tools)
        except ChatTemplateError as error:
            job.refuse(error)
            continue
        for row in rows:
            if len(row.token_ids) > job.max_length:
                job.report.over_long += 1
            elif (content := json.dumps([row.token_ids, row.spans])) in written:
                job.report.duplicates += 1  # chats that differ only in what follows their last answer
            else:
                written.add(content)
                is_finished = row.token_ids[row.spans[-1][1] - 1] in job.template.eos_ids
                records.append(row_record(row.token_ids, row.spans, prompt.text, None, is_finished))
    job.report.check_not_empty(records)
    settings = job.settings(selected, None)
    if output.exists():
        return job.report.count_rows(RowFile(output, settings))
    partial = output.with_name(output.name + ".partial")
    partial.unlink(missing_ok=True)
    file = RowFile(partial, settings)
    file.append(records)
    partial.rename(output)
    return job.report.count_rows(file)
