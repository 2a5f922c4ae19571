"""``python -m matbackprop`` is the command line."""


def main() -> None:
    """Start the command line."""
    from matbackprop.cli import main as run

    run()


if __name__ == "__main__":
    main()
