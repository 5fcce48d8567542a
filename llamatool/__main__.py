"""`python -m llamatool`."""

from llamatool.cli.app import main

if __name__ == "__main__":
    main()
