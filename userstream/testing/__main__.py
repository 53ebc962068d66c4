"""``python -m userstream.testing --library-path``: print the folder of the simulated driver.

In ``LD_LIBRARY_PATH`` that folder puts the simulated ``libcuda.so.1`` in the place of CUDA's for
programs that load it themselves, in any language.
"""

from __future__ import annotations

import argparse

from userstream.testing import library_path


def main() -> None:
    """Print the folder of the simulated driver."""
    parser = argparse.ArgumentParser(prog="python -m userstream.testing", description=__doc__)
    parser.add_argument(
        "--library-path",
        action="store_true",
        required=True,
        help="print the folder of the simulated libcuda.so.1, for LD_LIBRARY_PATH",
    )
    parser.parse_args()
    print(library_path())


if __name__ == "__main__":
    main()
