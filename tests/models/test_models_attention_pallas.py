import importlib.util
import os
import subprocess
import sys
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh

from actionopd_jax.errors import ConfigError
from actionopd_jax.models import attention
from actionopd_jax.models.mesh_axes import fitting_axes


def random_forest_ends(rng, length, padding=0):
    """Ends of subtrees, in preorder, of random trees, and of padding that nobody sees."""
    end = np.zeros(length, np.int32)
    open_ranges = [(0, length - padding)]
    while open_ranges:
        low, high = open_ranges.pop()
        while low < high:
            size = int(rng.integers(1, high - low + 1))
            end[low] = low + size
            open_ranges.append((low + 1, low + size))
            low += size
    return end


def random_inputs(seed, batch, length, heads, kv_heads, width, dtype=jnp.float32):
    rng = np.random.default_rng(seed)
    shapes = [(batch, length, h, width) for h in (heads, kv_heads, kv_heads, heads)]
    return [jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes], rng


def plain_attention(q, k, v, end, grad):
    """Output and gradients of q, k, v in float64, head by head."""
    q, k, v, grad = (np.asarray(x, np.float64) for x in (q, k, v, grad))
    out, d_q, d_k, d_v = (np.zeros_like(x) for x in (q, q, k, v))
    length, group = q.shape[1], q.shape[2] // k.shape[2]
    i, j = np.arange(length)[:, None], np.arange(length)[None, :]
    for b in range(q.shape[0]):
        mask = (j <= i) & (i < np.asarray(end)[b][None, :])
        for h in range(q.shape[2]):
            qh, kh, vh, gh = q[b, :, h], k[b, :, h // group], v[b, :, h // group], grad[b, :, h]
            weights = np.where(mask, np.exp(qh @ kh.T / np.sqrt(q.shape[3])), 0.0)
            total = weights.sum(axis=1, keepdims=True)
            weights = np.divide(weights, total, out=np.zeros_like(weights), where=total > 0)
            d_weights = gh @ vh.T
            d_scores = weights * (d_weights - (weights * d_weights).sum(axis=1, keepdims=True)) / np.sqrt(q.shape[3])
            out[b, :, h] = weights @ vh
            d_q[b, :, h] = d_scores @ kh
            d_k[b, :, h // group] += d_scores.T @ qh
            d_v[b, :, h // group] += weights.T @ gh
    return out, d_q, d_k, d_v


def run(implementation, block, q, k, v, end, grad):
    @jax.jit
    def both(q, k, v):
        out, pullback = jax.vjp(lambda *x: attention.attend(*x, jnp.asarray(end), implementation, block), q, k, v)
        return out, *pullback(grad)

    return both(q, k, v)


def relative_errors(actual, expected):
    return [np.abs(np.asarray(a, np.float64) - e).max() / np.abs(e).max() for a, e in zip(actual, expected, strict=True)]


PALLAS, BLOCKWISE = ("pallas_interpret", 128), ("blockwise", 48)


@pytest.mark.parametrize(
    ("implementation", "block", "heads", "kv_heads", "width", "length"),
    [(*PALLAS, 2, 2, 16, 300), (*PALLAS, 4, 2, 64, 256), (*PALLAS, 4, 1, 128, 384), (*BLOCKWISE, 4, 2, 16, 300)],
)
def test_attend_random_forests_matches_plain_float64(implementation, block, heads, kv_heads, width, length):
    (q, k, v, grad), rng = random_inputs(heads + width, 2, length, heads, kv_heads, width)
    end = np.stack([random_forest_ends(rng, length, padding=40), np.full(length, length, np.int32)])
    actual = run(implementation, block, q, k, v, end, grad)
    assert max(relative_errors(actual, plain_attention(q, k, v, end, grad))) < 1e-5


@pytest.mark.parametrize(("implementation", "block"), [("pallas_interpret", 256), BLOCKWISE])
def test_attend_queries_that_see_nothing_gives_zeros(implementation, block):
    (q, k, v, grad), rng = random_inputs(5, 2, 256, 2, 1, 32)
    end = np.stack([random_forest_ends(rng, 256), np.zeros(256, np.int32)])
    end[0, :130] = np.minimum(end[0, :130], 130)
    end[0, 130:200] = 0  # queries 130 to 199 see no key, among them a whole block of 48; the second row sees none at all
    actual = run(implementation, block, q, k, v, end, grad)
    assert np.all(np.asarray(actual[0][0, 130:200]) == 0)
    assert all(np.all(np.asarray(x[1]) == 0) for x in actual)
    assert max(relative_errors(actual, plain_attention(q, k, v, end, grad))) < 1e-5


def test_attend_pallas_large_scores_stay_finite():
    (q, k, v, grad), rng = random_inputs(7, 1, 128, 2, 1, 32)
    end = random_forest_ends(rng, 128)[None]
    actual = run("pallas_interpret", 128, 50 * q, k, v, end, grad)  # scores to 200: float32 cannot hold their exponentials
    assert max(relative_errors(actual, plain_attention(50 * q, k, v, end, grad))) < 1e-4


def test_attend_pallas_bfloat16_inputs_stay_within_their_rounding():
    (q, k, v, grad), rng = random_inputs(8, 1, 256, 4, 2, 64, jnp.bfloat16)
    end = random_forest_ends(rng, 256)[None]
    expected = plain_attention(q, k, v, end, grad)
    actual = run("pallas_interpret", 128, q, k, v, end, grad)
    assert all(x.dtype == jnp.bfloat16 for x in actual)
    assert max(relative_errors(actual, expected)) < 2**-6


def test_attend_auto_on_cpu_equals_blockwise():
    (q, k, v, grad), rng = random_inputs(9, 1, 130, 2, 1, 16)
    end = random_forest_ends(rng, 130)[None]
    for a, b in zip(run("auto", None, q, k, v, end, grad), run("blockwise", None, q, k, v, end, grad), strict=True):
        np.testing.assert_array_equal(a, b)


def test_attend_saved_names_spare_the_second_forward_pass():
    (q, k, v, grad), _ = random_inputs(10, 1, 128, 2, 1, 16)
    end = jnp.full((1, 128), 128, jnp.int32)

    def num_loops(policy):
        def gradients(q, k, v):
            attend = jax.checkpoint(lambda *x: attention.attend(*x, end, "blockwise"), policy=policy)
            return jax.vjp(attend, q, k, v)[1](grad)

        return str(jax.make_jaxpr(gradients)(q, k, v)).count("while[")

    saved = jax.checkpoint_policies.save_only_these_names(*attention.OUTPUT_NAMES)
    assert num_loops(saved) < num_loops(None)


def test_attend_unknown_implementation_is_refused():
    (q, k, v, grad), _ = random_inputs(11, 1, 16, 1, 1, 8)
    with pytest.raises(ConfigError, match="splash"):
        run("splash", None, q, k, v, np.full((1, 16), 16, np.int32), grad)


def test_fitting_axes_keeps_what_divides_outermost_first():
    mesh = AbstractMesh((2, 4, 3), ("replica", "fsdp", "tensor"))
    assert fitting_axes(mesh, ("replica", "fsdp"), 16) == ("replica", "fsdp")
    assert fitting_axes(mesh, ("replica", "fsdp"), 6) == ("replica",)
    assert fitting_axes(mesh, ("replica", "fsdp"), 1) == ()
    assert fitting_axes(mesh, ("context", "tensor"), 9) == ("tensor",)
    assert fitting_axes(None, ("tensor",), 9) == ()


ON_A_MESH = """
    import jax, jax.numpy as jnp, numpy as np
    from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
    from actionopd_jax.models import attention

    rng = np.random.default_rng(0)

    def on_mesh(shape, implementation, heads, kv_heads, length, ambient=False):
        draw = lambda h: jnp.asarray(rng.normal(size=(4, length, h, 16)), jnp.float32)
        q, k, v, grad = (draw(h) for h in (heads, kv_heads, kv_heads, heads))
        i = np.arange(length)
        end = jnp.asarray(np.minimum(np.maximum(i + 1, (i // 7 + 3) * 40), length - 9) * np.ones((4, 1)), jnp.int32)
        mesh = jax.make_mesh(tuple(shape.values()), tuple(shape), axis_types=(AxisType.Auto,) * len(shape))

        def both(q, k, v, mesh, implementation):
            attend = lambda *x: attention.attend(*x, end, implementation, 128, mesh=mesh)
            out, pullback = jax.vjp(attend, q, k, v)
            return out, *pullback(grad)

        expected = jax.jit(both, static_argnums=(3, 4))(q, k, v, None, "dense")
        rows = tuple(axis for axis in ("replica", "fsdp") if axis in shape)
        inputs = jax.device_put((q, k, v), NamedSharding(mesh, P(rows)))
        if ambient:
            with jax.set_mesh(mesh):
                actual = jax.jit(both, static_argnums=(3, 4))(*inputs, None, implementation)
        else:
            actual = jax.jit(both, static_argnums=(3, 4))(*inputs, mesh, implementation)
        error = max(float(jnp.abs(a - e).max() / jnp.abs(e).max()) for a, e in zip(actual, expected))
        assert error < 1e-5, (shape, implementation, error)

    # Rows over two axes; fewer key heads than shards of heads.
    on_mesh({"replica": 2, "fsdp": 2, "tensor": 2}, "blockwise", 4, 1, 130, ambient=True)
    # Queries over context, each part shorter than a block.
    on_mesh({"fsdp": 2, "context": 4}, "blockwise", 2, 1, 256)
    # Everything at once, parts padded to whole lanes.
    on_mesh({"fsdp": 2, "tensor": 2, "context": 2}, "pallas_interpret", 4, 2, 320)
    print("equal")
"""


def run_python(code, **environment):
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", **environment}
    command = [sys.executable, "-c", textwrap.dedent(code)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def test_attend_on_a_mesh_equals_one_device():
    # A busy machine may starve one of the virtual devices for a while.
    flags = "--xla_force_host_platform_device_count=8 --xla_cpu_collective_call_terminate_timeout_seconds=600"
    done = run_python(ON_A_MESH, XLA_FLAGS=flags)
    assert done.stdout.endswith("equal\n"), done.stderr[-3000:]


FOR_A_TPU = """
    import jax, jax.numpy as jnp, numpy as np
    from jax.experimental import topologies
    from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
    from actionopd_jax.models import attention

    devices = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x2").devices

    def compile_for(axis, spec, heads, kv_heads, length, width, dtype):
        mesh = Mesh(np.array(devices).reshape(2, 2), ("fsdp", axis))

        def both(q, k, v, end, grad):
            out, pullback = jax.vjp(lambda *x: attention.attend(*x, end, "auto", mesh=mesh), q, k, v)
            return out, pullback(grad)

        def array(heads):
            return jax.ShapeDtypeStruct((2, length, heads, width), dtype, sharding=NamedSharding(mesh, spec))

        end = jax.ShapeDtypeStruct((2, length), jnp.int32, sharding=NamedSharding(mesh, P("fsdp")))
        compiled = jax.jit(both).lower(array(heads), array(kv_heads), array(kv_heads), end, array(heads)).compile()
        assert compiled.as_text().count('custom_call_target="tpu_custom_call"') == 3
        assert compiled.cost_analysis()["flops"] > 0

    compile_for("tensor", P("fsdp", None, "tensor"), 4, 2, 2048, 128, jnp.bfloat16)
    compile_for("context", P("fsdp", "context"), 4, 1, 896, 64, jnp.float32)
    print("compiled")
"""


@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs libtpu: pip install 'actionopd-jax[tpu]'")
def test_attend_auto_compiles_its_kernels_for_a_tpu():
    done = run_python(
        FOR_A_TPU,
        TPU_SKIP_MDS_QUERY="1",
        TPU_ACCELERATOR_TYPE="v5litepod-4",
        TPU_WORKER_HOSTNAMES="localhost",
        TPU_WORKER_ID="0",
        ALLOW_MULTIPLE_LIBTPU_LOAD="1",
    )
    assert done.stdout.endswith("compiled\n"), done.stderr[-3000:]
