"""The program's entry: the `llamatool` script and `python -m llamatool`."""


def main() -> None:
    """Runs the command line."""
    import gc

    # What modules make while they load stays until the end, yet the collector walks it several
    # times on the way and once more at the exit: a fifth of the CPU time of a short command.
    # Frozen objects are left out of every later walk; what the commands make is collected as ever.
    gc.disable()
    from llamatool.cli.app import main as run

    gc.freeze()
    gc.enable()
    run()


if __name__ == "__main__":
    main()
