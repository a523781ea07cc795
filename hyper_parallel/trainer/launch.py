"""``python -m hyper_parallel.trainer.launch --config FILE [--section.key=value ...]``: run one configuration."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from ..config_loader import load_config


def main(argv: Sequence[str] | None = None) -> int:
    """Run; a mistake in the input is one readable message and exit code 2."""
    try:
        config = load_config(sys.argv[1:] if argv is None else argv)
        from .trainer import Trainer  # torch is loaded only once the configuration stands

        trainer = Trainer(config)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    try:
        trainer.train()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except (ValueError, FloatingPointError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
