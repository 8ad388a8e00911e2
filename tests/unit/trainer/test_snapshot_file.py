"""A snapshot file is what safetensors reads, and the same for the same weights."""

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor

from protocol.chunks import chunk_hashes
from trainer import snapshot_file
from trainer.snapshot_file import snapshot_chunks, write_snapshot

TENSORS: dict[str, Tensor] = {
    "b": torch.linspace(-1, 1, 12).reshape(3, 4),
    "a": torch.linspace(0, 3, 7, dtype=torch.float64),
    "half": torch.tensor([0.1, 0.2], dtype=torch.float16),
    "scalar": torch.tensor(1.5),
    "empty": torch.zeros(0, 3),
    "steps": torch.tensor([3, 4]),
    "mask": torch.tensor([True, False, True]),
    "view": torch.arange(6.0).reshape(2, 3).T,
}


def test_safetensors_reads_it_as_rounded_to_bfloat16(tmp_path: Path) -> None:
    size = write_snapshot(tmp_path / "file", TENSORS)
    assert (tmp_path / "file").stat().st_size == size
    loaded = load_file(tmp_path / "file")
    assert loaded.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        expected = tensor.to(torch.bfloat16) if tensor.is_floating_point() else tensor
        assert loaded[name].dtype == expected.dtype
        assert torch.equal(loaded[name], expected)


def test_its_bytes_by_hand(tmp_path: Path) -> None:
    write_snapshot(tmp_path / "file", {"w": torch.tensor([1.0, -2.0]), "n": torch.tensor([5])})
    data = (tmp_path / "file").read_bytes()
    header = {
        "__metadata__": {"format": "pt"},
        "n": {"dtype": "I64", "shape": [1], "data_offsets": [0, 8]},
        "w": {"dtype": "BF16", "shape": [2], "data_offsets": [8, 12]},
    }
    assert int.from_bytes(data[:8], "little") == len(data) - 8 - 12
    assert len(data[:-12]) % 8 == 0, "elements are aligned"
    assert json.loads(data[8:-12]) == header
    # 1.0 is 3f80 in bfloat16, -2.0 is c000.
    assert data[-12:] == bytes.fromhex("0500000000000000" "803f" "00c0")  # fmt: skip


def test_the_order_in_which_tensors_are_given_does_not_matter(tmp_path: Path) -> None:
    write_snapshot(tmp_path / "one", TENSORS)
    write_snapshot(tmp_path / "two", dict(reversed(TENSORS.items())))
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()


@pytest.mark.parametrize("piece", [1, 5, 2**21])
def test_pieces_do_not_show_in_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, piece: int) -> None:
    write_snapshot(tmp_path / "one", TENSORS)
    monkeypatch.setattr(snapshot_file, "PIECE_ELEMENTS", piece)
    write_snapshot(tmp_path / "two", TENSORS)
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()


@given(st.integers(1, 1000))
def test_chunks_are_those_of_the_file(chunk_size: int) -> None:
    data = b"".join(snapshot_file.snapshot_pieces(TENSORS))
    assert snapshot_chunks(TENSORS, chunk_size) == (len(data), chunk_hashes(data, chunk_size))


def test_a_file_that_ends_with_a_chunk_has_no_empty_one_after_it() -> None:
    size, _ = snapshot_chunks(TENSORS, 1000)
    assert len(snapshot_chunks(TENSORS, size)[1]) == 1
