"""`python -m tilewise.compat.hf_kernels FOLDER`: write the repository."""

from __future__ import annotations

import sys

from tilewise.compat.hf_kernels import write

if __name__ == "__main__":
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
        sys.exit("usage: python -m tilewise.compat.hf_kernels FOLDER")
    try:
        print(write(sys.argv[1]))
    except FileExistsError as error:
        sys.exit(f"{error.filename} exists: give a folder without a build")
    except OSError as error:
        sys.exit(f"{error.filename}: {error.strerror}")
