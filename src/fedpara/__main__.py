"""The command line as `python -m fedpara`, which is how `torchrun -m` starts it."""

from fedpara.apps.cli import main

if __name__ == "__main__":
    main()
