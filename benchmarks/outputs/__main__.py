"""``python -m benchmarks.outputs``: see `benchmarks.outputs.frozen`."""

import os
import warnings

ENVIRONMENT = {
    **dict.fromkeys(
        ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "TQDM_DISABLE"), "1"
    ),
    **dict.fromkeys(("DIFFUSERS_VERBOSITY", "TRANSFORMERS_VERBOSITY"), "error"),
}
"""Read by libraries when they are imported."""


def main() -> None:
    """Run the command line in one thread, without the bars and warnings of libraries."""
    os.environ |= ENVIRONMENT
    warnings.simplefilter("ignore")

    import torch

    from benchmarks.outputs.frozen import app

    torch.set_num_threads(1)
    app()


if __name__ == "__main__":
    main()
