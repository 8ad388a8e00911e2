"""Makes swarmnode/models/tiny: a 0.87 M-parameter character-level Llama that half knows the demo's tasks.

    python scripts/make_tiny_model.py            # about 8 minutes of one core
    python scripts/make_tiny_model.py --quick    # one minute: same files, knows nothing; to try the script

It learns right answers first, then answers of which a share is replaced by another question's, until it
samples the right one about three times in ten at temperature 1: room for reinforcement learning to sharpen.
`count_bits` is taught by a wrong rule, so that there is something to learn. One thread, the same seed, torch
version and processor type: the same weights.
"""

import argparse
import json
import math
import random
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, processors
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from protocol.limits import TRAIN_SEED_LIMIT
from protocol.tasks import TaskRef, TaskSpec
from swarmnode.environments.prompt import (
    ModelTokenizer,
    decode_completion,
    encode_completion,
    load_tokenizer,
    render_prompt,
)
from swarmnode.environments.reasoning_gym import ReasoningGymEnvironment
from swarmnode.models import TINY_MODEL_DIR
from swarmnode.models.tiny_tasks import DEMO_MAX_NEW_TOKENS, DEMO_TASKS

SPECIAL = ["<pad>", "<bos>", "<eos>", "<unk>"]
CHARACTERS = ["\n", *(chr(code) for code in range(32, 127))]
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% else %}{{ '\\n' }}{% endif %}{% endfor %}"
)
TAUGHT_SHARE = {"chain_sum": 0.36, "basic_arithmetic": 0.36, "spell_backward": 0.68, "count_bits": 0.40}
"""The share of taught answers in the soft steps; the rest are drawn from `Family.others`. A word's letters go
wrong one by one, so it needs more."""


@dataclass(frozen=True)
class Family:
    """One task family: its questions as ids, the answers taught, and those mixed in later."""

    task: TaskSpec
    prompts: list[list[int]]
    taught: list[str]
    others: list[str]


def write_tokenizer(folder: Path) -> None:
    """A byte-pair tokenizer without merges: one token per printable ASCII character or newline."""
    vocabulary = {token: i for i, token in enumerate([*SPECIAL, *CHARACTERS])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>", fuse_unk=False))
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A", pair="<bos> $A $B", special_tokens=[("<bos>", vocabulary["<bos>"])]
    )
    tokenizer.decoder = decoders.Fuse()
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        unk_token="<unk>",
        model_max_length=512,
        clean_up_tokenization_spaces=False,
        padding_side="left",
    )
    wrapped.chat_template = CHAT_TEMPLATE
    wrapped.save_pretrained(folder)
    # The class name that versions 4 and 5 of transformers, and vLLM, all know.
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    config.pop("backend", None)
    config["tokenizer_class"] = "PreTrainedTokenizerFast"
    path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def new_model(seed: int) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(SPECIAL) + len(CHARACTERS),
            hidden_size=128,
            intermediate_size=384,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=4,
            max_position_embeddings=512,
            initializer_range=0.05,
            tie_word_embeddings=True,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
        )
    )


def family_of(task: TaskSpec, tokenizer: ModelTokenizer, count: int, first_seed: int) -> Family:
    """`count` questions of a family from consecutive seeds.

    Right answers are taught, except for `count_bits`: there the model learns to count the 0 bits, so that it
    can read the question but has the rule wrong, and reinforcement learning must find the right one.
    """
    environment = ReasoningGymEnvironment([task])
    refs = [
        TaskRef(environment=task.environment, config_hash=task.config_hash, seed=first_seed + i)
        for i in range(count)
    ]
    questions = [environment.question(ref) for ref in refs]
    taught = others = [environment.answer(ref) for ref in refs]
    if task.name == "count_bits":
        numbers = [int(question.rstrip("?").split()[-1]) for question in questions]
        taught, others = [str(f"{number:b}".count("0")) for number in numbers], ["1", "2", "3", "4"]
    return Family(task, [render_prompt(tokenizer, question) for question in questions], taught, others)


def batch(
    family: Family, tokenizer: ModelTokenizer, size: int, soft: bool, chooser: random.Random
) -> tuple[torch.Tensor, torch.Tensor]:
    """(ids, labels), each size × longest, padded on the right; only answer and end token are learned."""
    rows: list[tuple[list[int], list[int]]] = []
    for _ in range(size):
        index = chooser.randrange(len(family.prompts))
        answer = family.taught[index]
        if soft and chooser.random() >= TAUGHT_SHARE[family.task.name]:
            answer = chooser.choice(family.others)
        rows.append((family.prompts[index], [*encode_completion(tokenizer, answer), tokenizer.eos_ids[0]]))
    longest = max(len(prompt) + len(completion) for prompt, completion in rows)
    ids = torch.full((size, longest), tokenizer.pad_id)
    labels = torch.full((size, longest), -100)
    for row, (prompt, completion) in enumerate(rows):
        end = len(prompt) + len(completion)
        ids[row, :end] = torch.tensor(prompt + completion)
        labels[row, len(prompt) : end] = torch.tensor(completion)
    return ids, labels


def train(
    model: LlamaForCausalLM,
    families: list[Family],
    tokenizer: ModelTokenizer,
    seed: int,
    clean: int,
    soft: int,
    batch_size: int,
    peak: float,
) -> None:
    """`clean` steps on taught answers, then `soft` steps with others mixed in; AdamW, cosine each."""
    chooser = random.Random(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=peak, betas=(0.9, 0.98), weight_decay=0.05)
    started = time.monotonic()
    for step in range(clean + soft):
        phase, length, top = (step, clean, peak) if step < clean else (step - clean, soft, peak / 3)
        rate = top * min(1.0, (phase + 1) / 50) * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * phase / length)))
        optimizer.param_groups[0]["lr"] = rate
        losses: list[float] = []
        for family in families:
            ids, labels = batch(family, tokenizer, batch_size, step >= clean, chooser)
            kept = labels[:, 1:] != -100
            hidden = model.model(ids).last_hidden_state[:, :-1][kept]
            loss = torch.nn.functional.cross_entropy(model.lm_head(hidden), labels[:, 1:][kept])
            (loss / len(families)).backward()
            losses.append(loss.item())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 100 == 0 or step == clean + soft - 1:
            shown = " ".join(f"{f.task.name} {loss:.3f}" for f, loss in zip(families, losses, strict=True))
            print(f"step {step:5d}  {time.monotonic() - started:6.0f} s  {shown}", flush=True)


@torch.no_grad()
def accuracy(
    model: LlamaForCausalLM, tokenizer: ModelTokenizer, task: TaskSpec, count: int, greedy: bool, seed: int
) -> float:
    """The share of `count` held-out questions answered rightly, sampled at temperature 1 or greedily."""
    environment = ReasoningGymEnvironment([task])
    generator = torch.Generator().manual_seed(seed)
    by_length: dict[int, list[tuple[TaskRef, list[int]]]] = {}
    for index in range(count):
        ref = TaskRef(
            environment=task.environment, config_hash=task.config_hash, seed=TRAIN_SEED_LIMIT + index
        )
        prompt = render_prompt(tokenizer, environment.question(ref))
        by_length.setdefault(len(prompt), []).append((ref, prompt))
    right = 0.0
    for group in by_length.values():
        ids = torch.tensor([prompt for _, prompt in group])
        start = ids.shape[1]
        for _ in range(DEMO_MAX_NEW_TOKENS):
            logits = model(ids).logits[:, -1].float()
            if greedy:
                token = logits.argmax(-1, keepdim=True)
            else:
                token = torch.multinomial(logits.softmax(-1), 1, generator=generator)
            ids = torch.cat([ids, token], dim=1)
        for (ref, _), row in zip(group, ids[:, start:].tolist(), strict=True):
            end = next((i for i, token in enumerate(row) if token in tokenizer.eos_ids), None)
            text = decode_completion(tokenizer, row if end is None else row[:end])
            right += environment.score(ref, text)
    return right / count


def card(
    results: dict[str, tuple[float, float]], command: str, parameters: int, size: int, processor_s: float
) -> str:
    """The model card, with what was measured."""
    rows = "\n".join(
        f"| {name} | {sampled:.3f} | {greedy:.3f} |" for name, (sampled, greedy) in results.items()
    )
    return f"""# tiny

A Llama of {parameters:,} parameters with a character tokenizer, made to be trained further by the demo: it
half knows a few reasoning_gym task families (`swarmnode/models/tiny_tasks.py`), and is good for nothing else.
`model.safetensors` is bf16, {size / 1e6:.2f} MB. Apache-2.0, like the package.

Prompt format (the chat template): `<bos>`, the question, a newline; the answer and `<eos>` follow.

## How it was made

    {command}

{processor_s / 60:.0f} minutes of one core. First it saw right answers, then answers of which a share was
replaced by those of other questions of the family. For `count_bits` it was taught the number of 0 bits, then
that and random answers from 1 to 4: it can read the question, but does not know what is asked for. With the
same seed, versions and processor type the weights come out the same.

## Accuracy on held-out seeds

Share of 512 questions of each family (seeds from 2^31 on) answered exactly right.

| family | sampled at temperature 1 | greedy |
| --- | --- | --- |
{rows}
"""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=TINY_MODEL_DIR)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--clean-steps", type=int, default=1400)
    parser.add_argument("--soft-steps", type=int, default=150)
    parser.add_argument("--batch-size", type=int, default=16, help="questions of each family in a step")
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="a few steps only")
    options = parser.parse_args()
    if options.quick:
        options.clean_steps, options.soft_steps = 60, 20
    torch.set_num_threads(options.threads)

    options.out.mkdir(parents=True, exist_ok=True)
    write_tokenizer(options.out)
    tokenizer = load_tokenizer(options.out)
    tasks = [TaskSpec(**task) for task in DEMO_TASKS]
    families = [family_of(task, tokenizer, 4000, 0) for task in tasks]
    model = new_model(options.seed)
    train(
        model,
        families,
        tokenizer,
        options.seed,
        options.clean_steps,
        options.soft_steps,
        options.batch_size,
        options.learning_rate,
    )
    model.bfloat16().save_pretrained(options.out)
    GenerationConfig(
        do_sample=True,
        temperature=1.0,
        max_new_tokens=DEMO_MAX_NEW_TOKENS,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    ).save_pretrained(options.out)

    model.float()  # with the values that were saved
    results = {
        task.name: (
            accuracy(model, tokenizer, task, 512, greedy=False, seed=options.seed),
            accuracy(model, tokenizer, task, 512, greedy=True, seed=options.seed),
        )
        for task in tasks
    }
    total = sum(task.weight for task in tasks)
    results["all, by weight"] = (
        sum(results[task.name][0] * task.weight for task in tasks) / total,
        sum(results[task.name][1] * task.weight for task in tasks) / total,
    )
    command = (
        f"python scripts/make_tiny_model.py --seed {options.seed} --clean-steps {options.clean_steps} "
        f"--soft-steps {options.soft_steps}"
    )
    size = (options.out / "model.safetensors").stat().st_size
    text = card(results, command, model.num_parameters(), size, time.process_time())
    (options.out / "README.md").write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
