"""The same updates on one device, on meshes of virtual devices, and in two processes."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

PROGRAM = Path(__file__).with_name("mesh_run.py")
# What depends on how examples are spread over bins and processes, not on what is computed.
_LAYOUT = ("padding", "token_ratio")


def _run(folder, mesh, num_processes=1):
    """Figures and arrays of a run with 8 virtual devices in all (1 without a mesh)."""
    devices = 8 // num_processes if mesh else 1
    # A busy machine may starve one of the virtual devices for a while.
    flags = f"--xla_force_host_platform_device_count={devices} --xla_cpu_collective_call_terminate_timeout_seconds=600"
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        address = f"localhost:{probe.getsockname()[1]}"
    output = folder / "result.npz"
    processes = [
        subprocess.Popen(
            [sys.executable, PROGRAM, json.dumps(mesh), str(number), str(num_processes), address, output],
            env={**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags},
            stderr=subprocess.PIPE,
            text=True,
        )
        for number in range(num_processes)
    ]
    complaints = [process.communicate(timeout=600)[1] for process in processes]
    assert all(process.returncode == 0 for process in processes), complaints[0][-3000:]
    stored = dict(np.load(output))
    return json.loads(str(stored.pop("figures"))), stored


@pytest.fixture(scope="module")
def one_device(tmp_path_factory):
    return _run(tmp_path_factory.mktemp("one"), {})


@pytest.mark.parametrize(
    ("mesh", "num_processes"),
    [
        pytest.param({"fsdp": 2, "tensor": 4}, 1, id="2x4"),
        pytest.param({"fsdp": 4, "tensor": 2}, 1, id="4x2"),
        pytest.param({"replica": 2, "fsdp": 2, "context": 2}, 1, id="2x2x2"),
        pytest.param({"fsdp": 4, "tensor": 2}, 2, id="two-processes"),
    ],
)
def test_updates_on_a_mesh_equal_those_on_one_device(one_device, tmp_path, mesh, num_processes):
    """Weights and moments after two updates of two steps; the first moments are the gradients, decayed."""
    figures, arrays = _run(tmp_path, mesh, num_processes)
    expected_figures, expected = one_device
    assert figures.keys() == expected_figures.keys()
    for name, value in expected_figures.items():
        if not name.startswith(_LAYOUT):
            np.testing.assert_allclose(figures[name], value, rtol=2e-4, atol=1e-5, err_msg=name)
    assert arrays.keys() == expected.keys()
    for name, value in expected.items():
        scale = max(float(np.abs(value).max()), 1e-6)
        np.testing.assert_allclose(arrays[name], value, rtol=0, atol=2e-5 * scale, err_msg=name)


def test_updates_change_the_weights(one_device):
    """What the comparison above would miss: nothing happening at all."""
    figures, arrays = one_device
    assert figures["optimizer_steps/1"] == 2
    assert figures["grad_norm/0"] > 1e-3
    moments = [value for name, value in arrays.items() if ".mu" in name and value.ndim > 1]
    assert moments
    assert all(np.abs(value).max() > 0 for value in moments)
