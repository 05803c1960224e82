"""A small language model trained from scratch on a corpus, and the answers it writes."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed

from experiments.lab.corpora import Corpus
from hf_dflow.training.data import TrainingRow

CONTEXT_LENGTH = 256


@dataclass(frozen=True)
class TargetRecipe:
    """Sizes and training schedule of a lab target."""

    num_layers: int = 6
    hidden_size: int = 192
    updates: int = 1200
    documents_per_update: int = 24
    learning_rate: float = 3e-3
    seed: int = 0


def new_model(tokenizer: PreTrainedTokenizerFast, num_layers: int, hidden_size: int) -> LlamaForCausalLM:
    """A randomly initialised Llama with heads of width 64 and tied embeddings."""
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=hidden_size,
        intermediate_size=hidden_size * 8 // 3 // 64 * 64,
        num_hidden_layers=num_layers,
        num_attention_heads=hidden_size // 64,
        num_key_value_heads=1,
        max_position_embeddings=2 * CONTEXT_LENGTH,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return LlamaForCausalLM(config)


def encode(corpus_texts: list[str], tokenizer: PreTrainedTokenizerFast) -> list[list[int]]:
    """Token ids of each document, cut to the context length, EOS at its end."""
    return [[*ids[: CONTEXT_LENGTH - 1], tokenizer.eos_token_id] for ids in tokenizer(corpus_texts)["input_ids"]]


def train_language_model(
    model: LlamaForCausalLM,
    documents: list[list[int]],
    recipe: TargetRecipe,
    progress: Callable[[int, float], None] = lambda update, loss: None,
) -> LlamaForCausalLM:
    """Next-token training on whole documents: AdamW, warm-up, cosine, bfloat16 arithmetic on float32 weights."""
    generator = torch.Generator().manual_seed(recipe.seed)
    pad_id: Any = model.config.pad_token_id
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, betas=(0.9, 0.98), weight_decay=0.01)
    model.train()
    for update in range(recipe.updates):
        warmup = min(1.0, (update + 1) / 50)
        rate = recipe.learning_rate * warmup * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * update / recipe.updates)))
        for group in optimizer.param_groups:
            group["lr"] = rate
        chosen = torch.randint(len(documents), (recipe.documents_per_update,), generator=generator).tolist()
        rows = [torch.tensor(documents[i]) for i in chosen]
        input_ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=pad_id)
        is_text = torch.nn.utils.rnn.pad_sequence([torch.ones_like(row) for row in rows], batch_first=True).bool()
        with torch.autocast("cpu", torch.bfloat16):
            # Right padding behind causal attention needs no mask.
            loss = model(input_ids, labels=input_ids.masked_fill(~is_text, -100)).loss
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if update % 50 == 49:
            progress(update + 1, loss.item())
    return model.eval()


@torch.no_grad()
def held_out_loss(model: LlamaForCausalLM, documents: list[list[int]]) -> float:
    """Mean next-token loss on held-out documents, in nats."""
    losses = [model(torch.tensor([ids]), labels=torch.tensor([ids])).loss.item() for ids in documents]
    return sum(losses) / len(losses)


def prompts(corpus: Corpus, texts: list[str], tokenizer: PreTrainedTokenizerFast, limit: int) -> list[list[int]]:
    """The prompts of the first `limit` documents of more than 24 tokens."""
    documents = [ids for ids in tokenizer(texts[: 2 * limit])["input_ids"] if len(ids) > 24]
    return [corpus.prompt_of(ids) for ids in documents[:limit]]


@torch.no_grad()
def answer(
    model: LlamaForCausalLM, prompt_ids: list[list[int]], max_new_tokens: int, temperature: float, seed: int = 0
) -> list[TrainingRow]:
    """The target's continuation of each prompt, greedy at temperature 0."""
    set_seed(seed)
    rows = []
    pad_id, eos_id = model.config.pad_token_id, model.config.eos_token_id
    sampling = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {"do_sample": False}
    by_length = sorted(prompt_ids, key=len)
    for start in range(0, len(by_length), 128):
        batch = by_length[start : start + 128]
        longest = max(map(len, batch))
        input_ids = torch.tensor([[pad_id] * (longest - len(ids)) + ids for ids in batch])
        mask = torch.tensor([[0] * (longest - len(ids)) + [1] * len(ids) for ids in batch])
        output = model.generate(input_ids, attention_mask=mask, max_new_tokens=max_new_tokens, **sampling)
        for ids, new in zip(batch, output[:, longest:].tolist(), strict=True):
            new = new[: new.index(eos_id) + 1] if eos_id in new else new
            rows.append(TrainingRow(ids + new, len(ids), f"{ids}", temperature))
    return rows


class Clock:
    """Prints the progress of a long training, with seconds since its start."""

    def __init__(self, name: str):
        self.name, self.started = name, time.perf_counter()

    def __call__(self, update: int, loss: float) -> None:
        print(f"{self.name} {update}: loss {loss:.3f}, {time.perf_counter() - self.started:.0f} s", flush=True)
