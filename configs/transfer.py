"""ActionOPD's transfer experiment (paper, section 3.1): a student trained on AWM and EnvScaler, tested elsewhere.

    actionopd preflight --config configs/transfer.py:student=qwen3_4b --topology v5e:8x8
    actionopd preflight --config configs/transfer.py:student=qwen3_8b --topology v5e:8x8

100 steps of 64 task starts, 59 AWM and 5 EnvScaler; the mesh is for 64 chips, and `docs/preflight.md` says on
which it fits. The roles, with the sampling of the paper's Table 8 (temperature / top-p / top-k / response tokens):

    student   Qwen3-4B or 8B      thinking              0.6 / 0.95 / 20 / 4,096   `student` and `sampler` below
    teacher   DeepSeek-V4-Flash   thinking, effort max  its own / 4,096           K = 3 in `method` below
              Qwen3.7-Flash       thinking              0.6 / 0.95 / - / 8,192
    matcher   DeepSeek-V4-Flash   no thinking           0 / - / - / 128
    user      DeepSeek-V4-Flash   no thinking           1 / - / - / its own       of EnvScaler's tasks
    student   in evaluation       thinking              greedy, 4,096

What trains is all here, so that preflight compiles the real programs. Collecting needs the environments `awm` and
`envscaler` and services for teacher, matcher and user: `train` refuses by name what is not there. Numbers that the
paper's text leaves open (learning rate, weight decay, gradient clip, minibatch) are this project's choice.
"""

from ml_collections import ConfigDict

STUDENTS = {"qwen3_4b": "Qwen/Qwen3-4B", "qwen3_8b": "Qwen/Qwen3-8B"}


def get_config(variant: str) -> ConfigDict:
    """The settings for `student=qwen3_4b` or `student=qwen3_8b`."""
    key, _, name = variant.partition("=")
    if key != "student" or name not in STUDENTS:
        choices = " or ".join(f"student={name}" for name in STUDENTS)
        raise ValueError(f"configs/transfer.py has no variant {variant!r}; give {choices}")

    return ConfigDict(
        {
            "seed": 0,
            "steps": 100,
            "student": {
                "path": STUDENTS[name],
                "compute_dtype": "bfloat16",
                "remat": "full",
                "max_prompt_tokens": 24_576,
                "max_response_tokens": 4_096,
                "thinking": True,
            },
            "sources": [
                {"environment": "awm", "split": "train", "starts_per_step": 59},
                {"environment": "envscaler", "split": "train", "starts_per_step": 5},
            ],
            "evaluation": {"environment": "bfcl", "split": "heldout"},
            "sampler": {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "slots": 16},
            "method": {
                "name": "actionopd",
                "num_candidates": 4,
                "num_teacher_samples": 3,
                "frequency_bonus": 0.5,
                "max_decisions": 20,
            },
            "update": {
                "learning_rate": 1e-6,
                "weight_decay": 0.01,
                "max_grad_norm": 1.0,
                "clip_eta": 0.2,
                "dual_clip": 3.0,
                "minibatch_candidates": 256,
                # Prompt and response of the longest row, which is also where most trees end.
                "bin_tokens": 28_672,
                "bins_per_microbatch": 1,
            },
            # 64 chips: 16 bins at a time, each on 4 neighbours.
            "mesh": {"replica": 1, "fsdp": 16, "tensor": 4, "context": 1},
            "rollout": {"concurrent_tasks": 64},
        }
    )
