"""python -m fedpara: the command line, as torchrun -m starts it."""

from fedpara.apps.cli import main

if __name__ == "__main__":
    main()
