"""`python -m oallama`."""

from oallama.cli.main import main

if __name__ == "__main__":
    main()
