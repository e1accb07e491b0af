"""`python -m tiered_zero`: the same as `tiered-zero`."""

from tiered_zero.cli.main import main

if __name__ == "__main__":
    main(prog_name="tiered-zero")
