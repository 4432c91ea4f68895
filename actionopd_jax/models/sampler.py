"""The embedded sampler: the student generates in this process, batched over the ready states of many tasks."""

import asyncio
import concurrent.futures
import contextlib
import dataclasses
import time
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from actionopd_jax.errors import ServiceError
from actionopd_jax.models import sharding
from actionopd_jax.models.decoder import Decoder
from actionopd_jax.models.generation import Generated, KeyValues, generate, prefill_prefix
from actionopd_jax.records import Finish, Sample, Sampling

_PREFIX_MULTIPLE = 64
_SMALLEST_SUFFIX = 256


@dataclasses.dataclass(frozen=True)
class _BatchKey:
    """Requests with equal keys run in one program, on equal shapes."""

    prefix: int  # index into the registered prefixes; -1: none
    suffix_bucket: int
    sampling: Sampling
    n: int


@dataclasses.dataclass(eq=False)
class _Request:
    key: _BatchKey
    suffix: tuple[int, ...]
    seed: int
    answer: asyncio.Future[list[Sample]]


@dataclasses.dataclass(eq=False)
class _Weights:
    """The weights of one policy version, and the prefixes computed with them so far."""

    params: nnx.State
    version: int
    prefixes: dict[int, KeyValues] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass
class SamplerCounters:
    """What the sampler did so far."""

    batches: int = 0
    prompts: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    busy_s: float = 0.0


class EmbeddedSampler:
    """Implements `protocols.Sampler` with in-process JAX.

    The same prompt, settings, seed and weights give the same samples whatever else is in flight:
    shapes depend on the request alone, and batches always have `slots` rows.

    Args:
        model: the student; its weights are replaced by `set_weights`.
        end_id: the end-of-turn token.
        num_valid_ids: the tokenizer's size; embedding rows beyond are never drawn.
        slots: prompts per batch.
        max_wait_ms: how long the first request of a batch waits for company.
        prefixes: token sequences that many prompts begin with; they are computed once per policy version.
        mesh: of this process's devices, where the weights lie; None: one device.
    """

    def __init__(
        self,
        model: Decoder,
        *,
        end_id: int,
        num_valid_ids: int,
        slots: int,
        max_wait_ms: float,
        prefixes: Sequence[Sequence[int]] = (),
        mesh: Mesh | None = None,
    ) -> None:
        self._mesh = mesh
        self._graphdef, params = nnx.split(model)
        self._weights = _Weights(params, version=0)
        self._config = model.config
        self._dtype = model.dtype
        self._end_id = end_id
        self._num_valid_ids = num_valid_ids
        self._slots = slots
        self._max_wait_s = max_wait_ms / 1000
        whole = (tuple(prefix[: len(prefix) // _PREFIX_MULTIPLE * _PREFIX_MULTIPLE]) for prefix in prefixes)
        self._prefixes = sorted((prefix for prefix in whole if prefix), key=len, reverse=True)
        self._waiting: list[_Request] = []
        self._pump: asyncio.Task[None] | None = None
        self._arrived = asyncio.Event()
        self._closed = False
        self._thread = concurrent.futures.ThreadPoolExecutor(max_workers=1, thread_name_prefix="sampler")
        self.counters = SamplerCounters()

    def set_weights(self, params: nnx.State, version: int) -> None:
        """Replaces the weights; nothing may be in flight."""
        if self._pump is not None and not self._pump.done():
            raise ServiceError("the student's weights cannot be replaced while responses are being sampled")
        self._weights = _Weights(params, version)

    def close(self) -> None:
        """Waits for the batch that is running; requests that still wait, and later ones, raise `ServiceError`."""
        self._closed = True
        self._thread.shutdown(wait=True, cancel_futures=True)

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling, n: int, seed: int) -> list[Sample]:
        """See `protocols.Sampler`.

        Raises:
            ServiceError: an empty prompt, ids outside the vocabulary, or a closed sampler.
        """
        prompt = tuple(prompt_ids)
        if self._closed:
            raise ServiceError("the sampler is closed")
        if not prompt or n < 1 or sampling.max_tokens < 1:
            raise ServiceError(
                f"cannot sample {n} responses of up to {sampling.max_tokens} tokens to a prompt of {len(prompt)} tokens"
            )
        if min(prompt) < 0 or max(prompt) >= self._config.vocab_size:
            raise ServiceError(f"prompt has ids outside the vocabulary of {self._config.vocab_size}")
        prefix = next((i for i, p in enumerate(self._prefixes) if len(p) < len(prompt) and prompt[: len(p)] == p), -1)
        suffix = prompt[len(self._prefixes[prefix]) :] if prefix >= 0 else prompt
        key = _BatchKey(prefix, bucket(len(suffix)), sampling, n)
        request = _Request(key, suffix, seed, asyncio.get_running_loop().create_future())
        if self._pump is None or self._pump.done():
            self._waiting.clear()  # left only where an event loop was shut down in mid-batch
            self._arrived = asyncio.Event()  # of this event loop
            self._pump = asyncio.create_task(self._run())
        self._waiting.append(request)
        self._arrived.set()
        return await request.answer

    async def _run(self) -> None:
        """Serves batches until nobody waits."""
        loop = asyncio.get_running_loop()
        while self._waiting:
            await self._fill(self._waiting[0].key)
            self._waiting = [request for request in self._waiting if not request.answer.done()]
            if not self._waiting:
                return
            if self._closed:
                for request in self._waiting:
                    request.answer.set_exception(ServiceError("the sampler was closed"))
                self._waiting.clear()
                return
            key = self._waiting[0].key
            batch = [request for request in self._waiting if request.key == key][: self._slots]
            self._waiting = [request for request in self._waiting if request not in batch]
            work = loop.run_in_executor(self._thread, self._sample, key, batch)
            await asyncio.wait([work])
            error = work.exception()
            for i, request in enumerate(batch):
                if request.answer.done():
                    continue  # cancelled
                if error is not None:
                    request.answer.set_exception(error)
                else:
                    request.answer.set_result(work.result()[i])

    async def _fill(self, key: _BatchKey) -> None:
        """Waits a moment for a full batch of this key."""
        deadline = time.monotonic() + self._max_wait_s
        while sum(request.key == key for request in self._waiting) < self._slots:
            self._arrived.clear()
            try:
                await asyncio.wait_for(self._arrived.wait(), deadline - time.monotonic())
            except TimeoutError:
                return

    def _sample(self, key: _BatchKey, batch: Sequence[_Request]) -> list[list[Sample]]:
        start = time.perf_counter()
        weights = self._weights
        suffix = np.zeros((self._slots, key.suffix_bucket), np.int32)
        lengths = np.ones(self._slots, np.int32)
        seeds = np.zeros((self._slots, 2), np.uint32)
        for row, request in enumerate(batch):
            suffix[row, : len(request.suffix)] = request.suffix
            lengths[row] = len(request.suffix)
            seeds[row] = (request.seed >> 32) & 0xFFFFFFFF, request.seed & 0xFFFFFFFF
        with contextlib.nullcontext() if self._mesh is None else jax.set_mesh(self._mesh):
            out = generate(
                self._graphdef,
                weights.params,
                self._prefix(weights, key.prefix),
                *(self._put(part) for part in (suffix, lengths, np.arange(self._slots) < len(batch), seeds)),
                sampling=key.sampling,
                num_candidates=key.n,
                num_valid_ids=min(self._num_valid_ids, self._config.vocab_size),
                end_id=self._end_id,
            )
        samples = _unpack(jax.device_get(out), len(batch), self._end_id, weights.version)
        self.counters.batches += 1
        self.counters.prompts += len(batch)
        self.counters.prompt_tokens += sum(len(request.suffix) for request in batch)
        self.counters.generated_tokens += sum(len(sample.ids) for row in samples for sample in row)
        self.counters.busy_s += time.perf_counter() - start
        return samples

    def _put(self, values: np.ndarray) -> jax.Array:
        return jnp.asarray(values) if self._mesh is None else sharding.put_batch(values, self._mesh)

    def _prefix(self, weights: _Weights, index: int) -> KeyValues:
        if index < 0:
            shape = (self._config.num_hidden_layers, 0, self._config.num_key_value_heads, self._config.head_dim)
            return KeyValues(jnp.zeros(shape, self._dtype), jnp.zeros(shape, self._dtype))
        if index not in weights.prefixes:
            tokens = jnp.asarray(self._prefixes[index], jnp.int32)
            weights.prefixes[index] = prefill_prefix(self._graphdef, weights.params, tokens)
        return weights.prefixes[index]


def _unpack(out: Generated, rows: int, end_id: int, version: int) -> list[list[Sample]]:
    """The samples of the first `rows` prompts of a batch."""
    samples: list[list[Sample]] = []
    for row in range(rows):
        candidates = []
        for i, length in enumerate(out.lengths[row]):
            ids = tuple(int(x) for x in out.ids[row, i, :length])
            logprobs = tuple(float(x) for x in out.logprobs[row, i, :length])
            finish = Finish.STOP if ids[-1] == end_id else Finish.LENGTH
            candidates.append(Sample(ids, logprobs, finish, version))
        samples.append(candidates)
    return samples


def bucket(length: int) -> int:
    """Padded suffix length: multiples of 256 up to 1024, then powers of two and the middles between them."""
    if length <= 4 * _SMALLEST_SUFFIX:
        return -(-length // _SMALLEST_SUFFIX) * _SMALLEST_SUFFIX
    power = 1 << (length - 1).bit_length()
    return power if length > power * 3 // 4 else power * 3 // 4
