"""A key-value cache for decoding: room for new tokens is reserved once, so a step copies one and not all."""

from typing import Any

import torch
from transformers import DynamicCache, PreTrainedConfig
from transformers.cache_utils import DynamicLayer


class ReservedLayer(DynamicLayer):
    """Keys and values [rows, heads, tokens, size] as views of buffers with room for `reserve` more tokens.

    The prompt's pass stores what it is given. `batch_select_indices` then makes the buffers, with rows
    repeated for the completions of a prompt or left out when finished, and later updates write into them.
    """

    def __init__(self, reserve: int) -> None:
        super().__init__()
        self.reserve = reserve
        self._buffers: tuple[torch.Tensor, torch.Tensor] | None = None

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if not self.is_initialized:
            self.dtype, self.device = key_states.dtype, key_states.device
            self.keys, self.values = key_states, value_states
            self.is_initialized = True
            return self.keys, self.values
        if self._buffers is None:
            return super().update(key_states, value_states)
        assert self.keys is not None
        start = self.keys.shape[2]
        end = start + key_states.shape[2]
        key_buffer, value_buffer = self._buffers
        if end > key_buffer.shape[2]:
            raise IndexError(f"the cache has room for {key_buffer.shape[2]} tokens, {end} were asked for")
        key_buffer[:, :, start:end] = key_states
        value_buffer[:, :, start:end] = value_states
        self.reserve -= end - start
        self.keys, self.values = key_buffer[:, :, :end], value_buffer[:, :, :end]
        return self.keys, self.values

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        assert self.keys is not None and self.values is not None
        key_buffer, value_buffer = self._buffers or (None, None)
        self.keys, key_buffer = self._selected(self.keys, key_buffer, indices)
        self.values, value_buffer = self._selected(self.values, value_buffer, indices)
        self._buffers = key_buffer, value_buffer

    def _selected(
        self, states: torch.Tensor, buffer: torch.Tensor | None, indices: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The rows `indices` of `states` as a view of a new buffer, and that buffer."""
        rows, heads, tokens, size = states.shape
        if self.reserve <= tokens:
            # One pass over buffers, with what is in their free part, is cheaper than two over what is used.
            if buffer is None:
                buffer = states.new_empty(rows, heads, tokens + self.reserve, size)
                buffer[:, :, :tokens] = states
            selected = buffer.index_select(0, indices)
        else:
            selected = states.new_empty(len(indices), heads, tokens + self.reserve, size)
            selected[:, :, :tokens] = states[indices]
        return selected[:, :, :tokens], selected


def decoding_cache(config: PreTrainedConfig, reserve: int) -> tuple[DynamicCache, bool]:
    """A cache for the model, and whether all its layers attend to everything (and so can share one mask).

    Layers of other kinds (sliding windows) keep the library's own cache.
    """
    cache = DynamicCache(config=config)
    plain = [type(layer) is DynamicLayer for layer in cache.layers]
    for index, is_plain in enumerate(plain):
        if is_plain:
            cache.layers[index] = ReservedLayer(reserve)
    return cache, all(plain)


def cache_bytes_per_token(config: PreTrainedConfig, dtype: torch.dtype) -> int:
    """Bytes that one token of one sequence takes in all layers (windows count as if they kept everything)."""
    text = config.get_text_config(decoder=True)
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    size = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    return int(2 * text.num_hidden_layers * heads * size * dtype.itemsize)
