"""Training a drafter; each file is one step of the pipeline.

Data: `prompts` → `templates` (chats as tokens) → `answers` (the target's own) → `collect` → `data` (rows, their files).
An update: `features` (the target's states) → `packing` (rows and anchors as tensors) → `rounds`, with `masks` and
`proposals` → `loss`.
A run: `config`, `start` (the drafter that it starts from), `trainer` (the loop), `checkpoint`, `log`, `evaluate`, `run`
(data files in, a drafter's folder out) and `commands`. The target is that of `frozen_target`.
"""
