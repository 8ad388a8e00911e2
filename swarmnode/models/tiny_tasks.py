"""The task families that the tiny model was made for and the demo trains on: short questions, short answers.

Three of them the model knows but answers through noise, so that reinforcement learning sharpens; in
`count_bits` it was taught a wrong rule, so that reinforcement learning must find the right one.
"""

from typing import Any

DEMO_TASKS: list[dict[str, Any]] = [
    {
        "environment": "reasoning_gym",
        "name": "chain_sum",
        "config": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1},
        "weight": 1.0,
    },
    {
        "environment": "reasoning_gym",
        "name": "basic_arithmetic",
        "config": {
            "min_terms": 2,
            "max_terms": 2,
            "min_digits": 1,
            "max_digits": 1,
            "operators": ["*"],
            "allow_parentheses": False,
            "allow_negation": False,
        },
        "weight": 1.0,
    },
    {
        "environment": "reasoning_gym",
        "name": "spell_backward",
        "config": {"min_word_len": 3, "max_word_len": 3},
        "weight": 1.0,
    },
    {
        "environment": "reasoning_gym",
        "name": "count_bits",
        "config": {"min_n": 1, "max_n": 15},
        "weight": 0.7,
    },
]
"""Arguments of `protocol.tasks.TaskSpec`."""

DEMO_MAX_NEW_TOKENS = 4
"""The longest answer has three characters; one more token ends it."""
