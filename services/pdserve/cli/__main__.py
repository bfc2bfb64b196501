"""`pdserve`, and `python -m pdserve.cli`."""

from __future__ import annotations

from pdserve.cli.app import app


def main() -> None:
    """Entry point of the console command. Exit codes: 0, 1 for what failed, 2 for wrong usage."""
    app()


if __name__ == "__main__":
    main()
