"""What a received group must survive before it is trained on, and that nothing in it stops the verifier."""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.messages import Completion, RolloutGroup
from protocol.refusals import RefusalReason, Refused
from protocol.run_spec import RunSpec
from protocol.tasks import TaskRef
from swarmnode.environments import Environment
from swarmnode.environments.prompt import ModelTokenizer, encode_completion, render_prompt
from swarmnode.processes import verifier as verifier_module
from swarmnode.processes.verifier import Verifier, answer

Make = Callable[..., RolloutGroup]


@pytest.fixture(scope="module")
def verifier(spec: RunSpec, environment: Environment, tokenizer: ModelTokenizer) -> Verifier:
    return Verifier(spec, environment, tokenizer)


def completion_of(ids: list[int], finish: Any, text: str | None = None) -> Completion:
    return Completion.build(ids, [-0.5] * len(ids), [(5, len(ids))], finish, text)


def refusal(verifier: Verifier, group: RolloutGroup, source: str) -> RefusalReason:
    with pytest.raises(Refused) as caught:
        verifier.check(group.encode(), source)
    assert caught.value.detail
    return caught.value.reason


def message(body: bytes, source: str = "local") -> dict[str, Any]:
    return {
        "type": "check",
        "id": b"i" * 32,
        "body": body,
        "sender": b"s" * 32,
        "run_id": b"r" * 32,
        "source": source,
    }


def test_an_honest_local_group_passes_with_own_prompt_and_rewards(
    verifier: Verifier, make_group: Make, tokenizer: ModelTokenizer, environment: Environment
) -> None:
    group = make_group()
    verdict = verifier.check(group.encode(), "local")
    assert verdict.prompt_ids == render_prompt(tokenizer, environment.question(group.task))
    assert verdict.completions is None
    assert verdict.rewards == [1.0, 0.0]


def test_another_prompt_is_refused(verifier: Verifier, make_group: Make) -> None:
    assert refusal(verifier, make_group(prompt_hash=b"x" * 32), "local") is RefusalReason.PROMPT_MISMATCH


@pytest.mark.parametrize("rewards", [[1.0, 1.0], [0.0, 0.0], [1.0, 0.01], [1.0 - 1e-5, 0.0]])
def test_a_claimed_reward_that_was_not_earned_is_refused(
    verifier: Verifier, make_group: Make, rewards: list[float]
) -> None:
    assert refusal(verifier, make_group(rewards=rewards), "local") is RefusalReason.REWARD_MISMATCH


def test_a_reward_within_the_tolerance_passes_and_is_replaced(verifier: Verifier, make_group: Make) -> None:
    verdict = verifier.check(make_group(rewards=[1.0 - 1e-7, 0.0]).encode(), "local")
    assert verdict.rewards == [1.0, 0.0]


@pytest.mark.parametrize("source", ["local", "external"])
def test_an_unknown_task_is_refused(verifier: Verifier, make_group: Make, source: str) -> None:
    stranger = TaskRef(environment="reasoning_gym", config_hash=b"?" * 32, seed=1)
    other = TaskRef(environment="elsewhere", config_hash=make_group().task.config_hash, seed=1)
    for task in (stranger, other):
        assert refusal(verifier, make_group(task=task), source) is RefusalReason.UNKNOWN_TASK


@pytest.mark.parametrize("source", ["local", "external"])
def test_rewards_must_be_as_many_as_completions(verifier: Verifier, make_group: Make, source: str) -> None:
    assert refusal(verifier, make_group(rewards=[1.0]), source) is RefusalReason.RAGGED_GROUP


@pytest.mark.parametrize("source", ["local", "external"])
def test_tokens_must_be_whole_numbers(verifier: Verifier, make_group: Make, source: str) -> None:
    broken = make_group().completions[0].model_copy(update={"tokens": b"\x07" * 5, "text": None})
    assert refusal(verifier, make_group(completions=[broken, broken]), source) is RefusalReason.RAGGED_GROUP


def test_end_tokens_must_agree_with_how_a_completion_finished(
    verifier: Verifier, make_group: Make, tokenizer: ModelTokenizer
) -> None:
    end, digit = tokenizer.eos_ids[0], encode_completion(tokenizer, "7")[0]
    wrong = [
        completion_of([digit, digit], "stop"),
        completion_of([digit, end, digit, end], "stop"),
        completion_of([end, end], "stop"),
        completion_of([digit, digit, digit, digit, digit, end], "length"),
        completion_of([end, digit, digit, digit, digit, digit], "length"),
    ]
    honest = make_group().completions[0]
    for completion in wrong:
        group = make_group(completions=[honest, completion])
        assert refusal(verifier, group, "local") is RefusalReason.BAD_TOKENS
    cut = completion_of([digit] * 6, "length")
    assert verifier.check(make_group(completions=[honest, cut]).encode(), "local").rewards == [1.0, 0.0]


def test_token_ids_outside_the_vocabulary_stand_for_nothing(
    verifier: Verifier, make_group: Make, tokenizer: ModelTokenizer
) -> None:
    strange = completion_of([2**32 - 1, 2**31, tokenizer.vocab_size, tokenizer.eos_ids[0]], "stop")
    group = make_group(completions=[make_group().completions[0], strange])
    assert verifier.check(group.encode(), "local").rewards == [1.0, 0.0]


def test_an_external_group_is_scored_by_its_texts_alone(
    verifier: Verifier, make_group: Make, tokenizer: ModelTokenizer, right_answer: str
) -> None:
    """Prompt hash, tokens and rewards are a stranger's; only the texts count."""
    foreign = [completion_of([900, 901], "stop", text) for text in (right_answer, "5 or so")]
    foreign.append(completion_of([900] * 6, "length", right_answer))
    group = make_group(prompt_hash=b"x" * 32, completions=foreign, rewards=[0.0, 1.0, 0.5])
    verdict = verifier.check(group.encode(), "external")
    end = [tokenizer.eos_ids[0]]
    own = [encode_completion(tokenizer, text) for text in (right_answer, "5 or so", right_answer)]
    # "5 or so" has seven characters, one token each, and the run allows six tokens.
    assert verdict.completions == [own[0] + end, own[1][:6], own[2]]
    assert verdict.rewards == [1.0, 0.0, 1.0]


def test_the_score_of_an_external_completion_is_that_of_what_is_left_after_the_cut(
    verifier: Verifier, make_group: Make, right_answer: str
) -> None:
    padded = right_answer + " " * (6 - len(right_answer)) + "!"
    group = make_group(completions=[completion_of([900], "stop", padded)] * 2)
    assert verifier.check(group.encode(), "external").rewards == [1.0, 1.0]


def test_no_text_can_smuggle_in_an_end_token(
    verifier: Verifier, make_group: Make, tokenizer: ModelTokenizer
) -> None:
    group = make_group(completions=[completion_of([900], "length", "<eos>")] * 2)
    verdict = verifier.check(group.encode(), "external")
    assert verdict.completions is not None
    assert not set(tokenizer.eos_ids) & {token for tokens in verdict.completions for token in tokens}


def test_without_text_only_tokens_of_the_own_tokenizer_are_taken(
    verifier: Verifier, make_group: Make
) -> None:
    bare = [each.model_copy(update={"text": None}) for each in make_group().completions]
    verdict = verifier.check(make_group(completions=bare).encode(), "external")
    assert verdict.completions == [each.token_array().tolist() for each in bare]
    assert verdict.rewards == [1.0, 0.0]
    foreign = make_group(completions=bare, prompt_hash=b"x" * 32)
    assert refusal(verifier, foreign, "external") is RefusalReason.MALFORMED


def test_an_external_group_without_a_single_token_is_refused(verifier: Verifier, make_group: Make) -> None:
    group = make_group(completions=[completion_of([900], "length", "")] * 2)
    assert refusal(verifier, group, "external") is RefusalReason.BAD_TOKENS


def test_the_answer_names_the_reason_first(verifier: Verifier, make_group: Make) -> None:
    checked = answer(verifier, message(make_group(prompt_hash=b"x" * 32).encode()))
    assert checked["type"] == "checked" and checked["id"] == b"i" * 32 and checked["ok"] is False
    assert checked["reason"].startswith("prompt_mismatch: ")
    good = answer(verifier, message(make_group().encode()))
    assert good["ok"] is True and good["reason"] is None and good["rewards"] == [1.0, 0.0]


class Hostile(Environment):
    """Does what a bad scorer could do with a bad text."""

    def __init__(self, inner: Environment) -> None:
        self.inner = inner

    def question(self, task: TaskRef) -> str:
        return self.inner.question(task)

    def score(self, task: TaskRef, completion: str) -> float:
        if completion == "raise":
            raise KeyError("a line\nof text")
        if completion == "deep":
            return self.score(task, completion)
        if completion == "loop":
            while True:
                try:
                    [number * number for number in range(1000)]
                except Exception:
                    continue
        return self.inner.score(task, completion)


@pytest.mark.parametrize(
    ("text", "error"), [("raise", "KeyError"), ("deep", "RecursionError"), ("loop", "CheckTooLong")]
)
def test_a_check_that_fails_is_a_verdict_and_the_next_one_works(
    spec: RunSpec,
    environment: Environment,
    tokenizer: ModelTokenizer,
    make_group: Make,
    monkeypatch: pytest.MonkeyPatch,
    text: str,
    error: str,
) -> None:
    monkeypatch.setattr(verifier_module, "MAX_CHECK_CPU_S", 0.2)
    hostile = Verifier(spec, Hostile(environment), tokenizer)
    checked = answer(hostile, message(make_group(texts=(text, "1")).encode()))
    assert checked["ok"] is False
    assert checked["reason"].startswith(f"verifier_failed: {error}: ")
    assert "\n" not in checked["reason"]
    assert answer(hostile, message(make_group().encode()))["ok"] is True


@given(st.binary(max_size=200))
def test_any_bytes_get_a_verdict(verifier: Verifier, body: bytes) -> None:
    assert answer(verifier, message(body))["reason"].startswith("malformed")


@given(
    texts=st.lists(st.text(max_size=40), min_size=2, max_size=2),
    source=st.sampled_from(["local", "external"]),
)
def test_any_text_gets_a_verdict(verifier: Verifier, make_group: Make, texts: list[str], source: str) -> None:
    completions = [completion_of([900], "stop", text) for text in texts]
    checked = answer(verifier, message(make_group(completions=completions).encode(), source))
    assert checked["ok"] is (source == "external")
