"""Any causal language model that transformers knows, as a rollout engine: batched decoding with seeded noise.

A group's prompt is computed once and its cache expanded to the group's completions; prompts of several groups
share a batch by padding on the left; rows that have finished leave the batch. Padding is masked and positions
are a sequence's own, so a completion does not depend on what else is in the batch (but for rounding).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from protocol.adapter import AdapterSpec
from swarmnode.engines.base import EngineError, GroupRequest, LoadError, SampledCompletion
from swarmnode.engines.building import (
    base_model_with_adapter,
    load_config,
    model_without_weights,
    usable_device,
)
from swarmnode.engines.gumbel_torch import sample_rows, signed_seed
from swarmnode.engines.kv_cache import cache_bytes_per_token, decoding_cache
from swarmnode.engines.layout import Layout, read_layout
from swarmnode.engines.memory import refuse_unless_fits
from swarmnode.engines.patching import LivePatch
from swarmnode.engines.weights import read_weights, swap_weights
from swarmnode.environments.prompt import load_tokenizer
from trainer.lora import loadable_tensors

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass
class _Rows:
    """The sequences of one batch that are still decoded, one row each."""

    index: torch.Tensor
    """Which of the batch's sequences a row is, int64 [rows]."""
    alive: torch.Tensor
    """False for rows that have finished but have not been dropped yet."""
    seeds: torch.Tensor
    completions: torch.Tensor
    lengths: torch.Tensor
    """Prompt tokens of each row."""
    mask: torch.Tensor | None
    """Which cached tokens are not padding, bool [rows, prompt + new tokens]; None when none is padding."""

    def select(self, rows: torch.Tensor) -> "_Rows":
        return _Rows(
            index=self.index[rows],
            alive=self.alive[rows],
            seeds=self.seeds[rows],
            completions=self.completions[rows],
            lengths=self.lengths[rows],
            mask=None if self.mask is None else self.mask[rows],
        )


class TransformersEngine:
    """See `swarmnode.engines.base.Engine`. Has no weights before the first `load`."""

    def __init__(
        self,
        model_dir: Path,
        *,
        device: str = "cpu",
        dtype: Literal["float32", "bfloat16"] = "float32",
        threads: int = 1,
        max_batch_sequences: int = 64,
        eos_ids: Sequence[int] | None = None,
        adapter: AdapterSpec | None = None,
    ) -> None:
        """`eos_ids`: what ends a completion; by default what the folder's tokenizer and configurations name.
        `adapter`: versions hold such an adapter only, and the folder's weights are the base model's.

        Raises `EngineError`, `NotEnoughMemory`, `TokenizerError`.
        """
        if dtype not in DTYPES:
            raise EngineError(f"engine.dtype is {dtype!r}: choose one of {', '.join(DTYPES)}")
        self.name = f"transformers/{dtype}"
        self.max_batch_sequences = max_batch_sequences
        self._device = usable_device(device)
        self._dtype = DTYPES[dtype]
        self._version: int | None = None
        self._layout: Layout | None = None
        if self._device.type == "cpu":
            torch.set_num_threads(threads)
        self._config = load_config(model_dir)
        ends = load_tokenizer(model_dir).eos_ids if eos_ids is None else tuple(eos_ids)
        self._eos = torch.tensor(ends, dtype=torch.int64, device=self._device)
        self._last = torch.tensor([-1], device=self._device)
        if adapter is None:
            self._model = model_without_weights(model_dir, self._config, self._dtype, self._device)
        else:
            self._model = base_model_with_adapter(model_dir, self._config, adapter, self._dtype, self._device)

    @property
    def version(self) -> int | None:
        return self._version

    @property
    def vocabulary_size(self) -> int:
        """Token ids lie below this."""
        return int(self._config.get_text_config(decoder=True).vocab_size)

    def load(self, path: Path, version: int, check: Callable[[], None] | None = None) -> None:
        """Replace the weights by those of a safetensors file. Whatever goes wrong, the old ones stay.

        `check` runs with the new weights in place and may raise `LoadError`.
        """
        own = loadable_tensors(self._model)
        tensors, layout = read_weights(path, own), read_layout(path)
        previous = swap_weights(own, tensors)
        try:
            if check is not None:
                check()
        except BaseException:
            swap_weights(own, previous)
            raise
        self._version, self._layout = version, layout

    def patch(self, deltas: Sequence[Path], version: int, check: Callable[[], None] | None = None) -> None:
        """See `Engine.patch`; `check` is that of `load`."""
        patch = self._new_patch()
        try:
            for path in deltas:
                patch.apply(path)
            if check is not None:
                check()
        except BaseException:
            patch.undo()
            raise
        self._version = version

    @property
    def patch_obstacle(self) -> str | None:
        try:
            self._new_patch()
        except LoadError as error:
            return str(error)
        return None

    def _new_patch(self) -> LivePatch:
        if self._layout is None:
            raise LoadError("no version is loaded that a delta could change")
        return LivePatch(loadable_tensors(self._model), self._layout)

    @torch.inference_mode()
    def probe(self, token_ids: list[int]) -> list[float]:
        ids = torch.tensor([token_ids], dtype=torch.int64, device=self._device)
        logits = self._model(input_ids=ids, use_cache=False).logits[0, :-1].float()
        logprobs = torch.log_softmax(logits, dim=-1).gather(1, ids[0, 1:, None])
        return [float(value) for value in logprobs[:, 0]]

    @torch.inference_mode()
    def generate(
        self, requests: list[GroupRequest], *, temperature: float, max_new_tokens: int
    ) -> list[list[SampledCompletion]]:
        """See `Engine.generate`. Raises `EngineError`, `NotEnoughMemory`."""
        if self._version is None:
            raise EngineError("no version is loaded: call load first")
        results: list[list[SampledCompletion]] = [[] for _ in requests]
        sequences = [
            (number, c) for number, request in enumerate(requests) for c in range(request.group_size)
        ]
        # Prompts of like length share a batch, so that little of it is padding.
        sequences.sort(key=lambda pair: (len(requests[pair[0]].prompt_ids), pair))
        for start in range(0, len(sequences), self.max_batch_sequences):
            part = sequences[start : start + self.max_batch_sequences]
            completions = self._decode(requests, part, temperature, max_new_tokens)
            for (number, _), completion in zip(part, completions, strict=True):
                results[number].append(completion)
        return results

    def _decode(
        self,
        requests: list[GroupRequest],
        sequences: list[tuple[int, int]],
        temperature: float,
        max_new_tokens: int,
    ) -> list[SampledCompletion]:
        """One completion per (request, completion) pair, all in one batch."""
        numbers = list(dict.fromkeys(number for number, _ in sequences))
        prompts = [requests[number].prompt_ids for number in numbers]
        if not all(prompts):
            raise EngineError(
                "a prompt has no tokens: the tokenizer or its chat template makes none of a question"
            )
        self._check_memory(len(sequences), max(map(len, prompts)), max_new_tokens)

        cache, shares_mask = decoding_cache(self._config, max_new_tokens)
        ids, mask = self._padded(prompts, max_new_tokens)
        logits = self._forward(
            cache,
            input_ids=ids,
            attention_mask=None if mask is None else mask[:, : ids.shape[1]],
            position_ids=None if mask is None else (mask[:, : ids.shape[1]].cumsum(1) - 1).clamp_(min=0),
        )
        place = {number: row for row, number in enumerate(numbers)}
        of_prompt = self._integers(place[number] for number, _ in sequences)
        cache.batch_select_indices(of_prompt)
        logits = logits[of_prompt]
        rows = _Rows(
            index=torch.arange(len(sequences), device=self._device),
            alive=torch.ones(len(sequences), dtype=torch.bool, device=self._device),
            seeds=self._integers(signed_seed(requests[number].group_seed) for number, _ in sequences),
            completions=self._integers(completion for _, completion in sequences),
            lengths=self._integers(len(requests[number].prompt_ids) for number, _ in sequences),
            mask=None if mask is None else mask[of_prompt],
        )

        tokens = torch.zeros(len(sequences), max_new_tokens, dtype=torch.int64, device=self._device)
        logprobs = torch.zeros(len(sequences), max_new_tokens, dtype=torch.float32, device=self._device)
        counts = torch.full((len(sequences),), max_new_tokens, device=self._device)
        stopped = torch.zeros(len(sequences), dtype=torch.bool, device=self._device)
        for position in range(max_new_tokens):
            chosen, chosen_logprobs = self._sample(logits, rows, position, temperature)
            index = rows.index[rows.alive]
            tokens[index, position] = chosen[rows.alive]
            logprobs[index, position] = chosen_logprobs[rows.alive]
            ends = torch.isin(chosen, self._eos) & rows.alive
            stopped[rows.index[ends]] = True
            counts[rows.index[ends]] = position + 1
            rows.alive = rows.alive & ~ends
            count = int(rows.alive.sum())
            if count == 0 or position + 1 == max_new_tokens:
                break
            if pays_to_drop(len(chosen) - count, count, max_new_tokens - position - 1):
                keep = rows.alive.nonzero()[:, 0]
                cache.batch_select_indices(keep)
                rows, chosen = rows.select(keep), chosen[keep]
            logits = self._step(cache, shares_mask, rows, chosen, ids.shape[1], position)
        return self._completions(tokens, logprobs, counts, stopped)

    def _step(
        self,
        cache: Any,
        shares_mask: bool,
        rows: _Rows,
        chosen: torch.Tensor,
        prompt_width: int,
        position: int,
    ) -> torch.Tensor:
        """Logits after one more token per row."""
        mask = None
        if rows.mask is not None:
            mask = rows.mask[:, : prompt_width + position + 1]
            if shares_mask:  # ready-made for the attention of every layer
                mask = mask[:, None, None, :]
        return self._forward(
            cache,
            input_ids=chosen[:, None],
            attention_mask=mask,
            position_ids=(rows.lengths + position)[:, None],
        )

    def _forward(self, cache: Any, **inputs: Any) -> torch.Tensor:
        # As a tensor: the slice that an integer gives is not contiguous, and the last layer's weight would
        # then be copied once per row.
        output = self._model(**inputs, past_key_values=cache, use_cache=True, logits_to_keep=self._last)
        logits: torch.Tensor = output.logits[:, -1].float()
        return logits

    def _sample(
        self, logits: torch.Tensor, rows: _Rows, position: int, temperature: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens and their log-probs under the distribution sampled from, each [rows]."""
        scores = logits if temperature == 1.0 else logits / temperature
        totals = torch.logsumexp(scores, dim=1)
        if not bool(torch.isfinite(totals).all()):
            raise EngineError(
                f"version {self._version} gives logits that are not finite: load another version"
            )
        chosen = sample_rows(scores, rows.seeds, rows.completions, torch.full_like(rows.seeds, position))
        logprobs = scores.gather(1, chosen[:, None])[:, 0] - totals
        return chosen, logprobs.clamp_(max=0.0)

    def _completions(
        self, tokens: torch.Tensor, logprobs: torch.Tensor, counts: torch.Tensor, stopped: torch.Tensor
    ) -> list[SampledCompletion]:
        assert self._version is not None
        found = zip(tokens.tolist(), logprobs.tolist(), counts.tolist(), stopped.tolist(), strict=True)
        return [
            SampledCompletion(
                token_ids=row_tokens[:count],
                logprobs=row_logprobs[:count],
                version_runs=[(self._version, count)],
                finish="stop" if stop else "length",
            )
            for row_tokens, row_logprobs, count, stop in found
        ]

    def _padded(
        self, prompts: list[list[int]], max_new_tokens: int
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Prompts padded on the left, int64 [prompts, longest], and the mask of `_Rows` for them."""
        longest = max(map(len, prompts))
        padded = [[0] * (longest - len(prompt)) + prompt for prompt in prompts]
        ids = torch.tensor(padded, dtype=torch.int64, device=self._device)
        if all(len(prompt) == longest for prompt in prompts):
            return ids, None
        mask = torch.ones(len(prompts), longest + max_new_tokens, dtype=torch.bool, device=self._device)
        for row, prompt in enumerate(prompts):
            mask[row, : longest - len(prompt)] = False
        return ids, mask

    def _integers(self, values: Any) -> torch.Tensor:
        return torch.tensor(list(values), dtype=torch.int64, device=self._device)

    def _check_memory(self, sequences: int, prompt_tokens: int, max_new_tokens: int) -> None:
        """The cache (twice while rows are dropped), the logits and their noise, before either is made."""
        per_token = cache_bytes_per_token(self._config, self._dtype)
        per_sequence = 2 * per_token * (prompt_tokens + max_new_tokens) + 4 * 4 * self.vocabulary_size
        refuse_unless_fits(
            sequences * per_sequence,
            self._device,
            f"a batch of {sequences} sequences of up to {prompt_tokens + max_new_tokens} tokens",
            f"lower engine.max_batch_sequences (one takes about {math.ceil(per_sequence / 2**20)} MiB)",
        )


def pays_to_drop(finished: int, alive: int, steps: int) -> bool:
    """Whether to copy the cache of the rows that are alive, so that `steps` more steps skip the others.

    Copying a row's cache takes about half as long as a step for it. Below a fifth of finished rows it waits
    for more, so that all copies of a batch together cost no more than five full ones.
    """
    return 4 * finished > alive and 2 * finished * steps > alive


__all__ = ["EngineError", "LoadError", "TransformersEngine"]
