"""Run the command line, for `tiered-zero` and `python -m tiered_zero`."""

import sys


def main() -> None:
    """Run the command line. Ctrl-C prints one line and exits with code 130, also while modules are still imported."""
    try:
        from tiered_zero.cli.main import main as run

        run(prog_name="tiered-zero")
    except KeyboardInterrupt:
        from tiered_zero.stopping import INTERRUPTED

        print("Interrupted.", file=sys.stderr)
        sys.exit(INTERRUPTED)


if __name__ == "__main__":
    main()
