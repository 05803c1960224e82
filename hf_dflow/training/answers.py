"""`python -m hf_dflow.training.answers`: the target's own answers to prompts, as rows to train on."""

import json
from pathlib import Path

import torch
import typer
from transformers import AutoModelForCausalLM, AutoTokenizer, set_seed

from hf_dflow.training.prompts import own_prompts


@torch.no_grad()
def answer(model, tokenizer, prompts: list[str], max_new_tokens: int, temperature: float) -> list[dict]:
    """Answer a batch of prompts with the target's own chat template.

    Returns:
        `list[dict]`: `prompt`, `prompt_ids`, `answer_ids` (EOS kept, padding cut), `temperature`, `finished`.
    """
    chats = [[{"role": "user", "content": prompt}] for prompt in prompts]
    rows = [tokenizer.apply_chat_template(chat, add_generation_prompt=True)["input_ids"] for chat in chats]
    longest = max(len(row) for row in rows)
    pad_id = tokenizer.pad_token_id
    input_ids = torch.tensor([[pad_id] * (longest - len(row)) + row for row in rows])
    attention_mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows])
    sampling = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {"do_sample": False}
    output = model.generate(
        input_ids, attention_mask=attention_mask, max_new_tokens=max_new_tokens, pad_token_id=pad_id, **sampling
    )
    eos_id = model.generation_config.eos_token_id
    records = []
    for prompt, row, answer_ids in zip(prompts, rows, output[:, longest:].tolist(), strict=True):
        finished = eos_id in answer_ids
        if finished:
            answer_ids = answer_ids[: answer_ids.index(eos_id) + 1]
        record = {"prompt": prompt, "prompt_ids": row, "answer_ids": answer_ids}
        records.append({**record, "temperature": temperature, "finished": finished})
    return records


def main(target: str, output: Path, max_new_tokens: int = 96, batch: int = 64, limit: int = 0) -> None:
    """Answer our own prompts, alternately greedy and at temperature 0.7; continues where OUTPUT ends."""
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(target)
    prompts = own_prompts()[: limit or None]
    done = len(output.read_text(encoding="utf-8").splitlines()) if output.exists() else 0
    for start in range(done, len(prompts), batch):
        temperature = 0.7 if (start // batch) % 2 else 0.0
        set_seed(start)
        records = answer(model, tokenizer, prompts[start : start + batch], max_new_tokens, temperature)
        with open(output, "a", encoding="utf-8") as lines:
            lines.writelines(json.dumps(record) + "\n" for record in records)
        print(f"{start + len(records)}/{len(prompts)} answers", flush=True)


if __name__ == "__main__":
    typer.run(main)
