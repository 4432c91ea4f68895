"""Floating-point operations of a training step, counted by hand: two for each multiply-add, matrices only."""

from actionopd_jax.models.decoder_config import DecoderConfig


def forward(student: DecoderConfig, tokens: int) -> float:
    """Of the layers over one causal row of `tokens`, head not included."""
    heads, kv_heads, head = student.num_attention_heads, student.num_key_value_heads, student.head_dim
    projections = student.hidden_size * head * 2 * (heads + kv_heads)
    mlp = 3 * student.hidden_size * student.intermediate_size
    visible_pairs = tokens * (tokens + 1) / 2
    attention = 4.0 * heads * head * visible_pairs  # scores, and their product with the values
    return student.num_hidden_layers * (2.0 * (projections + mlp) * tokens + attention)


def update(student: DecoderConfig, tokens: int, remat: str) -> float:
    """Forward and backward passes over one bin that is one causal row, every token a loss term.

    The backward pass takes two forward passes; recomputing whole layers one more, and the head's logits one more.
    """
    head = 2.0 * student.hidden_size * student.vocab_size * tokens
    layers = forward(student, tokens)
    return layers * (4 if remat == "full" else 3) + head * 4
