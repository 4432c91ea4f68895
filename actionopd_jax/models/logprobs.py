"""Log-probabilities of chosen tokens, in chunks: tokens x vocabulary is never held in full."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int32

_CHUNK = 512  # tokens whose logits exist at one time


class TokenScores(NamedTuple):
    """Per loss term: log-probability and entropy (nats) at the temperature, and whether greedy decoding picks the target."""

    logprobs: Float32[Array, "B L"]
    entropy: Float32[Array, "B L"]
    is_argmax: Bool[Array, "B L"]


def token_logprobs(
    hidden: Float[Array, "B T D"],
    head: Float[Array, "V D"],
    source: Int32[Array, "B L"],
    target: Int32[Array, "B L"],
    temperature: float,
) -> TokenScores:
    """Scores `log softmax(head @ hidden[source] / temperature)[target]` over the full vocabulary (paper, A.4).

    Args:
        source: index along T of the hidden state that predicts the target.
        temperature: positive; the rollout's.
    """
    batch, length = source.shape
    rows = jnp.take_along_axis(hidden, source[..., None], axis=1).reshape(batch * length, -1)
    targets = target.reshape(-1)
    chunk = min(_CHUNK, batch * length)
    padding = -(batch * length) % chunk
    rows = jnp.pad(rows, ((0, padding), (0, 0))).reshape(-1, chunk, rows.shape[-1])
    targets = jnp.pad(targets, (0, padding)).reshape(-1, chunk)

    @jax.checkpoint
    def score(args: tuple[Array, Array]) -> TokenScores:
        x, ids = args
        logits = jnp.einsum("nd,vd->nv", x, head, preferred_element_type=jnp.float32) / temperature
        total = jax.nn.logsumexp(logits, axis=-1)
        chosen = jnp.take_along_axis(logits, ids[:, None], axis=-1)[:, 0]
        frozen = jax.lax.stop_gradient(logits)
        mean_logit = jnp.sum(jax.nn.softmax(frozen, axis=-1) * frozen, axis=-1)
        return TokenScores(chosen - total, jax.lax.stop_gradient(total) - mean_logit, jnp.argmax(frozen, axis=-1) == ids)

    scores = jax.lax.map(score, (rows, targets))
    return TokenScores(*(part.reshape(-1)[: batch * length].reshape(batch, length) for part in scores))
