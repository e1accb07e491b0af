"""Run `tiered-zero` and `python -m tiered_zero`: import the commands after Ctrl-C is answered in one line."""

import sys


def main() -> None:
    """Run the command line. Ctrl-C while its modules are still imported ends as Ctrl-C does later: one line, exit code
    130."""
    try:
        from tiered_zero.cli.main import main as run

        run(prog_name="tiered-zero")
    except KeyboardInterrupt:
        from tiered_zero.stopping import INTERRUPTED

        print("Interrupted.", file=sys.stderr)
        sys.exit(INTERRUPTED)


if __name__ == "__main__":
    main()
