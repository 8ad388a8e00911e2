"""The reasoning_gym environment: same question everywhere, exact scores, harmless completions."""

import inspect
import os
import re
import subprocess
import sys
from importlib import import_module

import pytest
from reasoning_gym.factory import DATASETS

from protocol.limits import TRAIN_SEED_LIMIT
from protocol.tasks import TaskRef, TaskSpec
from swarmnode.environments import TaskConfigError, UnknownTask, build_environment
from swarmnode.environments.reasoning_gym import ANSWERS_EVALUATED, MAX_SCORED_CHARS, NOT_REPRODUCIBLE

SUM = TaskSpec(
    environment="reasoning_gym",
    name="chain_sum",
    config={"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1},
)
WORD = TaskSpec(
    environment="reasoning_gym", name="spell_backward", config={"min_word_len": 3, "max_word_len": 3}
)


def ref(task: TaskSpec, seed: int) -> TaskRef:
    return TaskRef(environment=task.environment, config_hash=task.config_hash, seed=seed)


def test_question_follows_from_the_seed_whatever_was_asked_before() -> None:
    one, other = build_environment([SUM, WORD]), build_environment([WORD, SUM])
    other.question(ref(WORD, 5))
    assert one.question(ref(SUM, 0)) == other.question(ref(SUM, 0))
    assert one.question(ref(SUM, 0)) == "State the final answer to the following arithmetic problem: 0 - 4 ="
    assert one.question(ref(WORD, 5)) == "Spell this word backward (example: sun -> nus): wen"


def test_held_out_seeds_have_questions_too() -> None:
    environment = build_environment([SUM])
    for seed in (TRAIN_SEED_LIMIT, 2**32 - 1):
        assert environment.question(ref(SUM, seed)).startswith("State the final answer")


@pytest.mark.parametrize(
    ("completion", "score"),
    [
        ("-4", 1.0),
        (" -4\n", 1.0),
        ("-4.0", 1.0),
        ("4", 0.0),
        ("-4 or 4", 0.0),
        ("-44", 0.0),
        ("", 0.0),
        ("-4x", 0.0),
    ],
)
def test_only_the_right_answer_scores(completion: str, score: float) -> None:
    assert build_environment([SUM]).score(ref(SUM, 0), completion) == score


def test_partial_credit_is_given_only_when_asked_for() -> None:
    # "new" backwards is "wen"; "won" has two of its three letters in place.
    task = ref(WORD, 5)
    assert build_environment([WORD]).score(task, "now") == 0.0
    assert build_environment([WORD]).score(task, "new") == 1.0
    assert build_environment([WORD], partial_credit=True).score(task, "now") == pytest.approx(2 / 3)


@pytest.mark.parametrize(
    "completion",
    [
        "\x00" * 100,
        "\ud800",
        "9" * MAX_SCORED_CHARS,
        "-4" + " " * 10 * MAX_SCORED_CHARS,
        "NaN",
        "Infinity",
        "1e999999999",
        "__import__('os').abort()",
        "[" * 5000,
        "٤" * 50,
        "{{ 7 * 7 }}<eos>",
    ],
)
def test_hostile_completions_score_nothing(completion: str) -> None:
    environment = build_environment([SUM, WORD])
    assert environment.score(ref(SUM, 0), completion) == 0.0
    assert environment.score(ref(WORD, 5), completion) == 0.0


def test_unknown_references_are_named() -> None:
    environment = build_environment([SUM])
    with pytest.raises(UnknownTask, match="no task family"):
        environment.question(ref(WORD, 1))
    with pytest.raises(UnknownTask, match="'chess' is not one"):
        environment.score(TaskRef(environment="chess", config_hash=SUM.config_hash, seed=1), "1")


@pytest.mark.parametrize(
    ("name", "config", "message"),
    [
        ("no_such_family", {}, "no task family"),
        ("chain_sum", {"min_terms": 3, "max_terms": 2}, "refuses its config"),
        ("chain_sum", {"no_such_key": 1}, "refuses its config"),
        ("chain_sum", {"size": 3}, "remove size"),
        ("spell_backward", {"data_file": "../../../../../etc/passwd"}, "remove data_file"),
        ("countdown", {}, "evaluates answers as code"),
        ("ransom_note", {}, "every process another question"),
        ("gsm_symbolic", {}, "no question for seed"),
    ],
)
def test_a_family_that_cannot_be_used_is_refused_when_the_run_is_set_up(
    name: str, config: dict[str, object], message: str
) -> None:
    with pytest.raises(TaskConfigError, match=message):
        build_environment([TaskSpec(environment="reasoning_gym", name=name, config=config)])


def test_unknown_environments_and_empty_runs_are_refused() -> None:
    with pytest.raises(TaskConfigError, match="unknown environment 'chess'"):
        build_environment([TaskSpec(environment="chess", name="mate_in_one")])
    with pytest.raises(TaskConfigError, match="at least one task family"):
        build_environment([])


def test_every_family_whose_scorer_evaluates_text_is_known() -> None:
    # Reviewed: basic and bitwise arithmetic evaluate their own problem, number_sorting its own answer; codeio
    # runs code of its own data; propositional_logic has a parser of that name that evaluates nothing.
    reviewed = {"basic_arithmetic", "bitwise_arithmetic", "codeio", "number_sorting", "propositional_logic"}
    evaluates = re.compile(
        r"(?<![\w.])(eval|exec|sympify)\(|parse_expr\(|__import__|\bpickle\b|subprocess|os\.system"
    )
    found = {
        name
        for name, (family, _) in DATASETS.items()
        if evaluates.search(inspect.getsource(import_module(family.__module__)))
    }
    assert found == ANSWERS_EVALUATED | reviewed


def test_questions_do_not_depend_on_the_process() -> None:
    # A handful of families of every kind; the known offenders show that the check can fail.
    program = """
import hashlib, json, sys
import reasoning_gym
for name in sys.argv[1:]:
    family = reasoning_gym.create_dataset(name, seed=0, size=1)
    items = [(family[seed]["question"], str(family[seed]["answer"])) for seed in range(12)]
    print(name, hashlib.sha256(json.dumps(items).encode()).hexdigest())
"""
    names = [
        "chain_sum",
        "spell_backward",
        "letter_counting",
        "family_relationships",
        "word_sorting",
        "ransom_note",
    ]

    def run(hash_seed: str) -> dict[str, str]:
        answer = subprocess.run(
            [sys.executable, "-c", program, *names],
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        )
        return dict(line.split() for line in answer.stdout.splitlines())

    one, other = run("1"), run("2")
    assert {name for name in names if one[name] != other[name]} == NOT_REPRODUCIBLE & set(names)
