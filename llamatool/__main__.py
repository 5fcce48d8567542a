"""The program's entry: the `llamatool` script and `python -m llamatool`."""


def main() -> None:
    """Runs the command line."""
    import gc

    # While modules load, the collector walks them over and over and finds nothing to free. That
    # alone is a twentieth of the start-up; benchmarks/startup.py shows it.
    gc.disable()
    from llamatool.cli.app import main as run

    gc.enable()
    run()


if __name__ == "__main__":
    main()
