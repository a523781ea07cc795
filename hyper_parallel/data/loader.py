"""The data set that ``data.type`` names, behind a loader whose place in the data can be saved and restored."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Subset
from torchdata.stateful_dataloader import StatefulDataLoader

from hyper_parallel.data.collator import collate
from hyper_parallel.data.conversations import ConversationDataset
from hyper_parallel.data.packing import PackedDataset, measure
from hyper_parallel.data.processor import Processor
from hyper_parallel.data.rows import JsonLines, SavedDataset
from hyper_parallel.data.sampler import GlobalBatchSampler
from hyper_parallel.data.spec import DataSpec
from hyper_parallel.data.synthetic import SyntheticDataset

# torchdata 0.11 still calls a function that torch has deprecated since.
warnings.filterwarnings("ignore", message="'set_vital' is deprecated")

if TYPE_CHECKING:
    from hyper_parallel.config import DataConfig

_ROWS = {"json_file": JsonLines, "hf_datasets": SavedDataset}


class ResumableLoader(StatefulDataLoader):
    """Micro-batches without end; ``state_dict`` is torchdata's, with the sampler's global position inside.

    Iterating again goes on after the last batch that was yielded.

    torchdata hands back the sampler's state as of the last batch that it *yielded*, whatever its workers have
    prefetched. Loading moves the sampler there and starts fresh workers, so a state may come from another rank, another
    number of ranks or another ``num_workers``.
    """

    batch_sampler: GlobalBatchSampler

    @property
    def steps_per_epoch(self) -> int:
        return self.batch_sampler.steps_per_epoch

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches to take per optimizer step."""
        return self.batch_sampler.num_micro_batches

    def __iter__(self) -> Any:
        if self._iterator is not None:
            # Otherwise the sampler would go on after what the abandoned iterator had prefetched.
            self.load_state_dict(self.state_dict())
        return super().__iter__()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.batch_sampler.load_state_dict(sampler_state(state_dict))
        super().load_state_dict({})


def sampler_state(loader_state: dict[str, Any]) -> dict[str, int]:
    """The sampler's state inside a loader's: ``epoch``, ``sample``, ``offset`` (see Position) and ``num_samples``."""
    main_process = loader_state.get("_snapshot", {}).get("_main_snapshot", loader_state)
    state = main_process.get("_index_sampler_state")
    if not isinstance(state, dict) or "sample" not in state:
        raise ValueError(
            "the saved loader state holds no global data position (another Trainer wrote it, in its own order): "
            "start the loader from batch_sampler.position_at(step) instead"
        )
    return state


def build_loader(
    config: DataConfig,
    spec: DataSpec,
    *,
    processor_path: str | None,
    rank: int,
    world_size: int,
    micro_batch_size: int,
    global_batch_size: int,
    seed: int,
    max_steps: int | None,
    start: tuple[int, ...] = (0, 0),
) -> ResumableLoader:
    """The training loader of data-parallel ``rank``, beginning at ``start`` = (epoch, sample).

    ``processor_path`` is where to look when ``data.processor_path`` is unset. ``max_steps`` sizes the synthetic data.
    """
    dataset: Dataset[Any]
    if config.type == "vl_dummy" and config.packing:
        raise ValueError("data.packing = true has nothing to pack: every sample of data.type vl_dummy is as long as the longest")
    if config.type == "vl_dummy":
        dataset = SyntheticDataset(
            spec,
            num_samples=config.train_size or max(0, max_steps or 0) * global_batch_size,
            max_seq_len=config.max_seq_len,
            grid_thw=(config.vl_grid_t, config.vl_grid_h, config.vl_grid_w),
            video=config.vl_video,
            seed=seed,
        )
    else:
        conversations = _conversations(config, spec, config.train_path, "train_path", processor_path)
        dataset = _first(conversations, config.train_size)
        if config.packing:
            lengths = measure(conversations, config.train_size or len(conversations), config.num_workers)
            dataset = PackedDataset(dataset, lengths, config.max_seq_len)
    sampler = GlobalBatchSampler(
        len(dataset),  # pyright: ignore[reportArgumentType]
        global_batch_size=global_batch_size,
        micro_batch_size=micro_batch_size,
        rank=rank,
        world_size=world_size,
        shuffle=config.shuffle,
        seed=seed,
        start=start,
    )
    return ResumableLoader(dataset, batch_sampler=sampler, **_loading(config))


def build_eval_loader(
    config: DataConfig,
    spec: DataSpec,
    *,
    processor_path: str | None,
    rank: int,
    world_size: int,
    micro_batch_size: int,
) -> DataLoader[dict[str, Tensor]]:
    """One pass over ``data.eval_path`` in file order; all ranks get as many micro-batches, the last may be empty."""
    if config.type == "vl_dummy":
        raise ValueError("data.eval_path needs data.type json_file or hf_datasets: vl_dummy has nothing to evaluate on")
    dataset = _conversations(config, spec, config.eval_path, "eval_path", processor_path)
    rounds = range(0, len(dataset), world_size * micro_batch_size)
    begins = [first + rank * micro_batch_size for first in rounds]
    batches = [list(range(len(dataset))[begin : begin + micro_batch_size]) for begin in begins]
    return DataLoader(dataset, batch_sampler=batches, **_loading(config))


def _conversations(
    config: DataConfig, spec: DataSpec, path: str | None, key: str, processor_path: str | None
) -> ConversationDataset:
    if config.type not in _ROWS:
        raise ValueError(f"data.type {config.type!r} is unknown: expected vl_dummy, {' or '.join(_ROWS)}")
    if not path:
        raise ValueError(f"data.type {config.type} needs data.{key}")
    directory = config.processor_path or processor_path
    if not directory:
        raise ValueError(
            f"data.type {config.type} needs a tokenizer: set data.processor_path, model.tokenizer_path or model.weights_path"
        )
    return ConversationDataset(
        _ROWS[config.type](path),
        Processor(directory, spec),
        max_seq_len=config.max_seq_len,
        messages_key=config.messages_key,
        text_key=config.text_key,
        image_key=config.image_key,
        train_on_prompt=config.train_on_prompt,
    )


def _first(dataset: ConversationDataset, size: int | None) -> Dataset[dict[str, Tensor]]:
    if size is None:
        return dataset
    if not 0 < size <= len(dataset):
        raise ValueError(f"data.train_size {size} must lie between 1 and the {len(dataset)} rows of the data")
    return Subset(dataset, range(size))


def _loading(config: DataConfig) -> dict[str, Any]:
    if config.prefetch_factor is not None and not config.num_workers:
        raise ValueError(f"data.prefetch_factor {config.prefetch_factor} has no effect without data.num_workers")
    return {
        "collate_fn": collate,
        "num_workers": config.num_workers,
        "prefetch_factor": config.prefetch_factor,
        # Every new iterator draws a worker seed; its own generator leaves the global one, which a resume restores, alone.
        "generator": torch.Generator().manual_seed(0),
        # Pinned memory only speeds up copies to an accelerator; without one torch warns on every epoch.
        "pin_memory": config.pin_memory and torch.accelerator.is_available(),
    }
