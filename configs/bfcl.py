"""ActionOPD on BFCL v4 multi-turn, with the ground truth as the teacher.

    pip install --no-deps bfcl-eval==2026.3.23 mpmath==1.3.0
    actionopd train --config configs/bfcl.py:debug --workdir /tmp/bfcl-debug
    actionopd train --config configs/bfcl.py --workdir gs://bucket/bfcl

`default` trains a Qwen3-4B folder (`--config.student.path=...`) on 150 base scenarios and evaluates greedily on
the 50 that are held out: 50 steps of 24 starts, up to 20 decisions each, 4 candidates per decision. Numbers are
those of the paper where it has them; it holds BFCL out, so nothing there says what to expect. The teacher is
deterministic: its 3 samples agree, and every agreeing candidate earns 1.5.

`debug` shows that everything runs: 2 steps of 2 starts on the task class with the shortest prompts, 3 decisions
each, on a student that has never seen these tools: a few minutes on two CPU cores, most of them prompts of 4,000
tokens. Expect rewards of -1 and 0, and a success rate of 0.
"""

from ml_collections import ConfigDict

VARIANTS = ("default", "debug")


def get_config(variant: str = "default") -> ConfigDict:
    """The settings of a variant, as `actionopd_jax.config.RunConfig` wants them."""
    if variant not in VARIANTS:
        raise ValueError(f"configs/bfcl.py has no variant {variant!r}; it has {', '.join(VARIANTS)}")
    debug = variant == "debug"

    # TradingBot alone has the shortest prompts: 20 tools; 4,000 tokens at the start, 5,000 at the end.
    settings = {"categories": ["base"], "classes": ["TradingBot"] if debug else []}

    return ConfigDict(
        {
            "seed": 0,
            "steps": 2 if debug else 50,
            "student": {
                "path": "builtin:service_desk" if debug else "Qwen3-4B",
                "max_prompt_tokens": 6_144 if debug else 24_576,
                "max_response_tokens": 64 if debug else 4_096,
                "thinking": not debug,
            },
            "sources": [
                {
                    "environment": "bfcl",
                    "split": "train",
                    "starts_per_step": 2 if debug else 24,
                    "num_tasks": 4 if debug else 0,
                    "settings": settings,
                }
            ],
            "evaluation": {
                "environment": "bfcl",
                "split": "heldout",
                "num_tasks": 1 if debug else 0,
                "every_steps": 0 if debug else 10,
                "settings": settings,
            },
            "sampler": {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "slots": 2 if debug else 16},
            "method": {
                "name": "actionopd",
                "num_candidates": 2 if debug else 4,
                "num_teacher_samples": 1 if debug else 3,
                "frequency_bonus": 0.5,
                "max_decisions": 3 if debug else 20,
            },
            "update": {
                "learning_rate": 1e-6,
                "clip_eta": 0.2,
                "dual_clip": 3.0,
                "minibatch_candidates": 8 if debug else 256,
                "bin_tokens": 6_272 if debug else 32_768,
            },
            "rollout": {"concurrent_tasks": 2 if debug else 64},
        }
    )
