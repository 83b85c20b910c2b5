"""`python -m syncline` is `syncline`."""

from syncline.cli.main import main

if __name__ == "__main__":
    main()
