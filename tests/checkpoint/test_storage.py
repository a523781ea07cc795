"""Single files: what is written comes back, with the right permissions and checksums."""

import os
import threading

import pytest
import torch
import xxhash
from safetensors.torch import load_file

from hyper_parallel.core.distributed_checkpoint.storage import (
    checksum,
    write_pt,
    write_tensors,
)


def test_the_checksum_is_that_of_the_whole_file(tmp_path):
    for size in (0, 1, (1 << 24) - 1, 1 << 24, (1 << 24) + 1):
        data = bytes(bytearray(range(256)) * (size // 256 + 1))[:size]
        (tmp_path / "file").write_bytes(data)
        assert checksum(tmp_path / "file") == xxhash.xxh3_128(data).hexdigest()


def test_files_are_readable_as_the_umask_says(tmp_path):
    before = os.umask(0o022)
    try:
        write_tensors(tmp_path / "tensors", {"w": torch.zeros(2)})
        write_pt(tmp_path / "pt", 1)
        assert [path.stat().st_mode & 0o777 for path in (tmp_path / "tensors", tmp_path / "pt")] == [0o644, 0o644]
    finally:
        os.umask(before)


def test_views_of_one_buffer_and_strided_tensors_are_written(tmp_path):
    flat, table = torch.arange(13.0), torch.arange(12.0).view(3, 4)
    views = {"a": flat[:4], "b": flat[4:12].view(2, 4), "c": flat[12], "d": flat[3:3], "e": table.t(), "f": table[:, 1:3]}
    write_tensors(tmp_path / "file", views)
    stored = load_file(tmp_path / "file")
    assert stored.keys() == views.keys() and all(torch.equal(stored[name], views[name]) for name in views)


def test_torchs_checksums_are_left_as_they_were(tmp_path):
    if not hasattr(torch.serialization, "set_crc32_options"):
        pytest.skip("this torch always writes them")
    assert torch.serialization.get_crc32_options()
    write_pt(tmp_path / "file", 1)
    assert torch.serialization.get_crc32_options()


def test_torchs_checksums_are_left_as_they_were_by_two_writers(tmp_path, monkeypatch):
    """A rank's files are written by two threads: here the second begins before the first ends, and ends after it."""
    if not hasattr(torch.serialization, "set_crc32_options"):
        pytest.skip("this torch always writes them")
    second_began, first_ended = threading.Event(), threading.Event()

    def save(value, file):
        if value == "first":
            second.start()
            second_began.wait(2)  # in vain, if writers wait for each other
        else:
            second_began.set()
            first_ended.wait(5)

    monkeypatch.setattr(torch, "save", save)
    second = threading.Thread(target=write_pt, args=(tmp_path / "second", "second"))
    try:
        write_pt(tmp_path / "first", "first")
        first_ended.set()
        second.join()
        assert torch.serialization.get_crc32_options()
    finally:
        torch.serialization.set_crc32_options(True)
