"""A plain PyTorch and transformers step on the same rows and weights: full logits, rows padded on the right."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from protocol import Rows, serve
from transformers import AutoModelForCausalLM


def build(rows: Rows, settings: dict[str, Any], folder: Path) -> Any:
    """The dual-clipped token mean, global-norm clipping, AdamW."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).train()
    numbers, eta = settings["optimizer"], settings["clip_eta"]
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=numbers["learning_rate"], weight_decay=numbers["weight_decay"], eps=1e-8
    )
    sequences = [np.concatenate([p, r]) for p, r in zip(rows.prompts, rows.responses, strict=True)]
    longest = max(len(sequence) for sequence in sequences)
    tokens = torch.zeros(len(sequences), longest, dtype=torch.long)
    mask, active = torch.zeros_like(tokens), torch.zeros_like(tokens, dtype=torch.bool)
    old = torch.zeros(tokens.shape)
    for i, (sequence, prompt) in enumerate(zip(sequences, rows.prompts, strict=True)):
        tokens[i, : len(sequence)] = torch.as_tensor(sequence, dtype=torch.long)
        mask[i, : len(sequence)] = 1
        active[i, len(prompt) : len(sequence)] = True
        old[i, len(prompt) : len(sequence)] = torch.as_tensor(rows.old_logprobs[i], dtype=torch.float32)
    first = int(active.any(0).nonzero()[0])  # logits before it are not needed
    target, active, old = tokens[:, first:], active[:, first:], old[:, first:]
    advantages = torch.as_tensor(rows.advantages, dtype=torch.float32)[:, None]

    def step() -> float:
        logits = model(tokens, attention_mask=mask, logits_to_keep=longest - first + 1).logits[:, :-1]
        new = torch.log_softmax(logits.float(), -1).gather(-1, target[..., None])[..., 0]
        ratio = torch.exp(torch.where(active, new - old, 0))
        terms = torch.minimum(ratio * advantages, ratio.clamp(1 - eta, 1 + eta) * advantages)
        terms = torch.where(advantages < 0, torch.maximum(terms, settings["dual_clip"] * advantages), terms)
        loss = -terms[active].sum() / active.sum()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), numbers["max_grad_norm"])
        optimizer.step()
        return float(loss)

    return step


if __name__ == "__main__":
    serve(build)
